#!/bin/sh
# Remove from a directory of installed packages what no build, worker or server needs: large packages' own tests, Arrow's headers and
# the parts of it that nothing here imports, what botocore knows of services other than S3, zstandard's backend for other Pythons.
#   docker/trim.sh .venv/lib/python3.11/site-packages
set -eu
cd "$1"
rm -rf pandas/tests numpy/tests numpy/*/tests pyarrow/tests pyarrow/include pyarrow/src pyarrow/*.pyx pyarrow/*.pxi \
    pyarrow/*flight* pyarrow/libarrow_python*.so pyarrow/libarrow_python*.so.*.* zstandard/_cffi.*
find botocore/data -mindepth 1 -maxdepth 1 -type d ! -name s3 ! -name "sso*" ! -name sts ! -name signin -exec rm -r {} +
