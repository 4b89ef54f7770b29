"""A reward for Python code that passes tests."""

import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from crosstrain import Episode, PositiveFloat, PositiveInt, Reward, RewardOptions, registry

_BLOCK = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)


@registry.register_reward("program")
class ProgramReward(Reward):
    """1 if the last code block of the text, followed by the tests in the reference answer, runs without an error.

    The model's code runs in a Python process without the user's packages and environment, in an empty folder, with
    limits on time, memory and files. This limits accidents, not attacks: train in a container without secrets.
    """

    @dataclass
    class Options(RewardOptions):
        """Limits of the process."""

        seconds: PositiveFloat = 5.0  # of CPU time, and twice as much in all
        megabytes: PositiveInt = 512  # of memory

    options: Options

    def __call__(self, episode: Episode) -> float:
        blocks = _BLOCK.findall(episode.text)
        program = f"{blocks[-1] if blocks else episode.text}\n\n{episode.answer}"
        return float(run_python(program, self.options.seconds, self.options.megabytes) is not None)


def run_python(program: str, seconds: float, megabytes: int) -> str | None:
    """Run a program in a process with limits and return its output; None if it fails or exceeds a limit."""

    def limit() -> None:
        size, whole = megabytes << 20, int(seconds) + 1
        for kind, value in (
            (resource.RLIMIT_AS, size),
            (resource.RLIMIT_CPU, whole),
            (resource.RLIMIT_FSIZE, 1 << 20),
            (resource.RLIMIT_NPROC, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))

    with tempfile.TemporaryDirectory() as folder:
        try:
            found = subprocess.run(
                [sys.executable, "-I", "-S", "-"],
                input=program.encode(errors="replace"),
                capture_output=True,
                cwd=folder,
                env={},
                timeout=2 * seconds,
                preexec_fn=limit,
                check=True,
            )
        except (subprocess.SubprocessError, OSError):
            return None
    return found.stdout.decode(errors="replace")
