"""Run the state machine of ``test_stateful.py`` for as long as asked: ``make soak``, or

    python tests/soak.py --steps 20000 --device cpu --seed 0 --minutes 60

It ends after so many steps, or after so many minutes if that comes first. The last line is the summary. At the first
difference it prints the course that shows it, as a program and shortened, and exits with status 1.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time

import torch
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import Difference, shorten
from test_stateful import Machine
from tqdm import tqdm


class Enough(BaseException):
    """As many steps or minutes as were asked for."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20000, help="end after so many steps")
    parser.add_argument("--minutes", type=float, default=None, help="end after so many minutes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same courses")
    parser.add_argument("--length", type=int, default=40, help="steps in one sequence")
    parser.add_argument("--shorten", type=float, default=120.0, help="seconds to spend on shortening a failing course")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Soak; gives the exit status."""
    args = parse(argv)
    torch.set_num_threads(1)  # the tensors are small
    torch.backends.cudnn.deterministic = True  # a difference must be fxgraph's, not that of two runs in eager
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # inputs that do not fit are meant
    end = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    bar = tqdm(total=args.steps, unit="step", disable=None)  # only on a terminal

    class Soaking(Machine):
        def take(self, *step: object) -> None:
            before = type(self).steps
            super().take(*step)
            bar.update(type(self).steps - before)
            bar.set_postfix(sequences=type(self).sequences, refresh=False)

        def teardown(self) -> None:
            super().teardown()
            if type(self).steps >= args.steps or (end is not None and time.monotonic() > end):
                raise Enough

    Soaking.device = args.device
    batch = settings(
        max_examples=25,
        stateful_step_count=args.length,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    number, difference = 0, None
    try:
        while True:
            seed(args.seed * 1_000_003 + number)(Soaking)
            run_state_machine_as_test(Soaking, settings=batch)
            torch._dynamo.reset()
            gc.collect()
            number += 1
    except Enough:
        pass
    except Difference as error:
        difference = error
    except Exception as error:  # Hypothesis wraps what does not come up again
        difference = Soaking.difference or error
    bar.close()
    if difference is not None:
        shorter = shorten(Soaking.failed, args.shorten) if Soaking.failed is not None else None
        sys.stdout.write(
            f"{difference}\n\n{'Shortened:' if shorter else 'It did not come up again.'}\n\n{shorter or ''}\n"
        )
    sys.stdout.write(
        f"soak: {Soaking.steps} steps, {Soaking.sequences} sequences, {int(difference is not None)} differences, "
        f"{args.device}, torch {torch.__version__}, seed {args.seed}\n"
    )
    return int(difference is not None)


if __name__ == "__main__":
    sys.exit(main())
