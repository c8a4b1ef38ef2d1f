# Fails if a stub has died: the process of a model's instance, which no release of Triton starts again.
# It does not ask the engine, which the model starts again by itself.
#
# Before 26.03 Triton keeps a dead stub as a zombie, and stays ready. Later releases collect it when they are asked for
# readiness. So the stubs that the first call finds are noted, in a file named by the time at which the server started:
# /tmp outlives a container that Kubernetes starts again, and the ids of processes repeat.
#
# Do not use it with --model-control-mode=explicit or poll: an unload ends stubs, too.
read -r server < /proc/1/stat
started=$(set -- ${server##*) }; echo "${20}")
noted=/tmp/stubs-of-$started

living=
for stat in /proc/[0-9]*/stat; do
  # PID (NAME) STATE PARENT ...; the process may have ended since. The kernel keeps 15 characters of a name.
  read -r line 2> /dev/null < "$stat" || continue
  case $line in *"(triton_python_b) "*) ;; *) continue ;; esac
  set -- $line
  # vLLM's processes may bear this name for a moment; tritonserver is not their parent.
  read -r parent 2> /dev/null < "/proc/$4/comm" || continue
  [ "$parent" = tritonserver ] || continue
  if [ "$3" = Z ]; then
    echo "a stub is dead: process $1" >&2
    exit 1
  fi
  living="$living $1"
done

[ -e "$noted" ] || echo "$living" > "$noted"
read -r expected < "$noted"
for stub in $expected; do
  case "$living " in *" $stub "*) ;; *) echo "a stub is gone: process $stub" >&2; exit 1 ;; esac
done
