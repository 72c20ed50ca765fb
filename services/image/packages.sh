#!/bin/sh
# Installs the packages of services/locks/ for EXTRAS into /opt/venv, every file by its hash, and removes unused files.
#
# PyTorch's CPU build is not on the index that the locks are of: it comes by its version from wheels/ or TORCH_INDEX_URL, and by
# its hash too where TORCH_HASHES has them ("sha256:... sha256:...", one for each platform).
set -eu

into_venv() { python3 -m pip --python /opt/venv/bin/python "$@"; }

install() { into_venv install --only-binary :all: --find-links . ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} "$@"; }

extras=$(echo "$EXTRAS" | tr , ' ')
locks=""
for lock in base $extras; do
    if [ ! -f "services/locks/$lock.txt" ]; then
        echo "EXTRAS=$EXTRAS: there is no services/locks/$lock.txt; there are: $(cd services/locks && echo *.txt)" >&2
        exit 2
    fi
    locks="$locks -r services/locks/$lock.txt"
done
install --require-hashes $locks

case " $extras " in
*" torch "*)
    torch=$(grep '^torch==' constraints.txt)
    for hash in ${TORCH_HASHES:-}; do torch="$torch --hash=$hash"; done
    echo "$torch" >torch.txt
    # a build for CUDA brings libraries of its own, which are on its index too; the CPU's needs what the lock has
    case "${TORCH_INDEX_URL:-}" in "" | */cpu | */cpu/) alone=--no-deps ;; *) alone="" ;; esac
    install $alone ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} -r torch.txt
    ;;
esac
if ! into_venv check; then
    echo "What is installed does not fit together (above). If PyTorch misses nvidia-...: it is the build for CUDA. For the" \
        "CPU's put its wheel into wheels/ or set TORCH_INDEX_URL; for CUDA 13 set EXTRAS=torch,cuda13" >&2
    exit 1
fi

cd /opt/venv/lib/python3*/site-packages
find numba numpy llvmlite -type d -name tests -prune -exec rm -rf {} +
rm -rf numpy/distutils numpy/f2py numpy/_core/_simd.* # the last one is for tests
if [ -d torch ]; then
    rm -rf torch/test torch/include torch/bin/*[Tt]est* torch/bin/protoc*
else # torch needs the first, and may use the others
    into_venv uninstall -y -q setuptools
    rm -rf numba/cuda
    find pygments/lexers -type f ! -name '__init__.*' ! -name '_mapping.*' ! -name 'python.*' -delete
fi
find . -name '*.[ach]' -o -name '*.py[ix]' -o -name '*.pxd' | xargs rm -f

# Strip symbols that only a debugger reads. Those of *.libs and of two of numba's files stay: auditwheel has moved their
# segments, which strip would misplace; works.py would notice.
for package in aiohttp cryptography frozenlist llvmlite multidict numba numpy propcache safetensors wrapt yarl; do
    if [ -d "$package" ]; then
        find "$package" -type f -name '*.so' ! -name '???pool.*' -exec strip --strip-unneeded {} +
    fi
done
/opt/venv/bin/python -B /build/services/image/works.py
