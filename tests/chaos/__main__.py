"""`python -m tests.chaos`: random faults, from a seed, on real processes; exit status 1 if the promise was broken.

A seed determines the order, kinds, times and amounts of the faults, but not what the processes are doing when one
arrives: a replay (`--seed N`) is as hard, not identical.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Before torch is imported, below.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "doubles")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])

SEEDS, FAULTS = (1, 2, 3, 4, 5), 44
RANKS_SEEDS, RANKS_FAULTS = (6, 9), 16


def main() -> int:
    arguments = _parser().parse_args()
    from tests.chaos.disk import enter_namespace

    with_disk = enter_namespace()  # before anything can have started a thread
    if not with_disk:
        print("chaos: mount namespaces are unavailable here: the checkpoint folder's disk will not be filled")
    out = (arguments.out or Path(tempfile.mkdtemp(prefix="chaos-out-"))).resolve()
    began = time.monotonic()
    if arguments.self_test:
        from tests.chaos.broken_protocols import self_test

        num_failed = self_test(out, with_disk=with_disk)
    else:
        from tests.chaos.campaign import campaign
        from tests.chaos.report import write_report

        results = campaign(_legs(arguments), out, with_disk=with_disk)
        write_report(out / "results.json", out / "faults.md")
        num_failed = sum(bool(result.verdict.problems) for result in results)
    print(f"chaos: {time.monotonic() - began:.0f} s, {num_failed} failed")
    if num_failed or arguments.out is not None:
        print(f"chaos: logs and results.json are in {out}")
    else:
        shutil.rmtree(out)
    return 1 if num_failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seed",
        type=int,
        action="append",
        help=f"only this one; may be given again (default: {SEEDS[0]} to {SEEDS[-1]}, and {RANKS_SEEDS[0]} and "
        f"{RANKS_SEEDS[1]} with a sharded trainer)",
    )
    parser.add_argument("--faults", type=int, help="faults per seed (default: by the leg)")
    parser.add_argument("--gap", type=float, default=1.6, help="mean seconds between two faults (default: 1.6)")
    parser.add_argument("--ranks", action="store_true", help="the trainer is sharded over two ranks")
    parser.add_argument("--server", choices=["redis", "valkey"], help="(default: by seed)")
    parser.add_argument("--only", metavar="KIND", help="faults of this kind alone; see faults.py")
    parser.add_argument("--break", dest="broken", metavar="NAME", help="break the protocol on purpose; see roles.py")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a run may need to end (default: 90)")
    parser.add_argument(
        "--self-test", action="store_true", help="break the protocol on purpose, and check that it is detected"
    )
    parser.add_argument("--out", type=Path, help="folder for logs and results (default: temporary, kept on failure)")
    return parser


def _legs(arguments: argparse.Namespace) -> list[Any]:
    from tests.chaos.leg import Leg

    def leg(seed: int, *, ranks: bool) -> Leg:
        return Leg(
            seed=seed,
            num_faults=arguments.faults or (RANKS_FAULTS if ranks else FAULTS),
            mean_gap_s=arguments.gap,
            with_ranks=ranks,
            server=arguments.server,
            only=arguments.only,
            broken=arguments.broken,
            limit_s=arguments.limit,
        )

    if arguments.seed:
        return [leg(seed, ranks=arguments.ranks) for seed in arguments.seed]
    return [leg(seed, ranks=False) for seed in SEEDS] + [leg(seed, ranks=True) for seed in RANKS_SEEDS]


if __name__ == "__main__":
    sys.exit(main())
