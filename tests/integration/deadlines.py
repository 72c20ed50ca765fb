"""Seconds that a test waits for what must happen.

A test's deadline is for a hang, not for speed: it holds on two cores that others use as well, with nothing cached. What
is promised to be fast is measured where the promise is tested, by a number of its own.
"""

from typing import Final

HANG_S: Final = 120.0
"""Seconds after which a process, a call or a step that should take a moment hangs; less than pytest's own time-out."""
WHOLE_S: Final = 280.0
"""Seconds for all that the processes of a test do, so that pytest's time-out is not the one that ends them."""
