"""A script whose end is what `test_finishing` is about: joins a job as rank 1 and ends as its argument says."""

import sys

import axon_ps

how = sys.argv[1]
world = axon_ps.World.init(timeout_s=120)
world.barrier("there", 40.0)
if how == "close":
    world.close()
elif how == "exit with 0":
    sys.exit(0)
elif how == "with and exit":
    with world:
        sys.exit()
elif how == "exit with 3":
    sys.exit(3)
elif how == "error":
    raise ValueError("this worker gives up")
elif how == "error in with":
    with world:
        raise ValueError("this worker gives up")
elif how == "close while it fails":
    try:
        raise ValueError("this worker gives up")
    finally:
        world.close()
