"""Proves, while an image is built, that nothing that was left out or stripped is missed.

It loads every library of the environment, and lets LLVM, BLAS and the certificates' library work.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from numba import njit, prange

NOT_HERE = "cannot open shared object file"
"""A library wants another one, such as TBB, that it can do without: its wheel had it so."""
LOADED_BY_OTHERS = {"torch", "nvidia", "cupy", "triton", "cuda", "cupy_backends"}
"""Packages that are as in their wheels: their libraries want GPUs, or others that the package loads first."""


def broken_libraries(site: Path) -> list[str]:
    """Return the shared libraries that cannot be loaded, with the reason."""
    broken = []
    for library in sorted(site.rglob("*.so*")):
        if library.relative_to(site).parts[0] in LOADED_BY_OTHERS:
            continue
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            if NOT_HERE not in str(error):
                broken.append(f"{library}: {error}")
    return broken


@njit(parallel=True, nogil=True)
def doubled(values: np.ndarray) -> float:
    """Run a compiled loop in several threads."""
    total = 0.0
    for i in prange(values.size):
        total += 2.0 * values[i]
    return total


def main() -> None:
    """Try everything; ends with 1 and the reason where something is broken."""
    broken = broken_libraries(Path(sysconfig.get_paths()["purelib"]))
    if broken:
        sys.exit("\n".join(broken))
    square = np.eye(300) * 2
    assert doubled(np.ones(1000)) == 2000.0
    assert np.allclose(np.linalg.inv(square) @ square, np.eye(300))
    ec.generate_private_key(ec.SECP256R1())


if __name__ == "__main__":
    main()
