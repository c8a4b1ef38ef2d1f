"""The answers of a smoke run, as a build prints them."""

from vllm_env.build import BuildResult


def answer_lines(result: BuildResult) -> list[str]:
    """Return the lines for a user; none if nothing was served."""
    smoke = result.smoke
    if smoke is None:
        return []
    lines = [f"{prompt!r} -> {answer!r}" for prompt, answer in smoke.answers]
    if smoke.recalled:
        lines.insert(0, f"the smoke run of {smoke.served_at} (--smoke-run repeats it):")
    # The client's last line says PASS or FAIL.
    return [*lines, smoke.client_lines[-1]]


def answer_facts(result: BuildResult) -> dict[str, object]:
    """Return the facts for a program, which needs the keys also if nothing was served."""
    smoke = result.smoke
    answers = smoke.answers if smoke else ()
    pairs = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
    return {
        "smoke_run": pairs if smoke else None,
        "served_at": smoke.served_at if smoke else None,
        "recalled": smoke is not None and smoke.recalled,
        "not_served": result.unserved,
    }
