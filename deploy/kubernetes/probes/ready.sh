# Succeeds if a model takes requests: ready.sh MODEL [PORT]
#
# From 26.03 on Triton asks the model. Before, it calls a model ready whose engine restarts, or whose stub is dead. So this
# sends a request that the model refuses: at once, without its engine, and with another text if there is no healthy one.
# It runs in the container because Kubernetes cannot send a POST.
model=$1
port=${2:-8000}

ask() {  # METHOD PATH BODY: print the whole response
  exec 3<> "/dev/tcp/127.0.0.1/$port" || exit 1
  printf '%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s' "$1" "$2" "${#3}" "$3" >&3
  cat <&3
}

case $(ask GET "/v2/models/$model/ready" "") in
  "HTTP/1.1 200 "*) ;;
  *) echo "Triton does not call $model ready" >&2; exit 1 ;;
esac
case $(ask POST "/v2/models/$model/generate" '{"text_input": "", "parameters": {"not_a_parameter": 1}}') in
  # "Model is unavailable due to unhealthy vLLM engine", "Stub process 'vllm_0_0' is not healthy."
  "" | *healthy*) echo "$model has no healthy engine" >&2; exit 1 ;;
esac
