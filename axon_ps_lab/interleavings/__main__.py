"""`make lab NAME=simulate`: simulate a range of seeds; `python -m axon_ps_lab.interleavings --seeds 0:100`."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from axon_ps_lab.interleavings import planted


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="from:to")
    parser.add_argument("--trace", action="store_true", help="print it, and end with the first seed that fails")
    parser.add_argument("--first", action="store_true", help="end with the first seed that fails")
    parser.add_argument("--plant", type=int, help="number of a bug of `planted` that is in the product")
    parser.add_argument("--rows", action="store_true", help="replicas of two workers each, with different units")
    options = parser.parse_args()
    if options.plant is not None:
        planted.plant(planted.PLANTS[options.plant])
    from axon_ps_lab.interleavings.simulate import as_text, shortest, simulate

    logging.disable(logging.CRITICAL)
    first, last = map(int, options.seeds.split(":"))
    failed, began_s = [], time.perf_counter()
    for seed in range(first, last):
        try:
            trace = simulate(seed, rows=options.rows)
            if options.trace:
                print("\n".join(trace))
        except Exception as error:
            failed.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            if options.trace:
                print(as_text(*shortest(seed, error, rows=options.rows)))
            if options.trace or options.first:
                break
    print(f"{last - first} seeds, {len(failed)} failed, {time.perf_counter() - began_s:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
