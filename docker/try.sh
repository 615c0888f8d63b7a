#!/bin/sh
# Build docker/Dockerfile and run what it makes, without a container engine's service: as root, with Debian's buildah and mmdebstrap.
#   docker/try.sh SCRATCH
# The base is a Debian of this machine's mirror in place of the pinned one. SCRATCH keeps the base and the image: some 3 GB.
# PIP_CONFIG (/etc/pip.conf) and CERTIFICATES are what this machine needs to reach its package index. Status 77: it cannot be tried here.
set -eu
cd "$(dirname "$0")/.."
scratch=$(realpath --canonicalize-missing "${1:?usage: docker/try.sh SCRATCH}")
certificates=${CERTIFICATES:-/etc/ssl/certs/ca-certificates.crt}
pip_config=${PIP_CONFIG:-/etc/pip.conf}
if [ "$(id -u)" != 0 ]; then echo "needs root" >&2; exit 77; fi
for program in buildah mmdebstrap; do
    command -v $program > /dev/null || { echo "needs $program" >&2; exit 77; }
done
mkdir -p "$scratch"
export BUILDAH_ISOLATION=chroot
images() { command="$1"; shift; buildah --root "$scratch/images" --runroot "$scratch/run" "$command" "$@"; }

if [ ! -s "$scratch/base.tar" ]; then
    mmdebstrap --quiet --variant=apt --include=python3.11,python3-venv,python3-pip,ca-certificates \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --customize-hook='ln -s python3.11 "$1/usr/bin/python"; rm "$1"/usr/lib/python3*/EXTERNALLY-MANAGED' bookworm "$scratch/base.part.tar"
    mv "$scratch/base.part.tar" "$scratch/base.tar"
fi
printf 'FROM scratch\nADD base.tar /\n' > "$scratch/Dockerfile.base"
images bud --quiet --file "$scratch/Dockerfile.base" --tag flat-tokens-base "$scratch" > /dev/null
set -- --volume "$certificates:$certificates:ro"
if [ -e "$pip_config" ]; then set -- "$@" --volume "$pip_config:/etc/pip.conf:ro"; fi
images bud --quiet --layers --format docker --network host --build-arg BASE=localhost/flat-tokens-base "$@" --file docker/Dockerfile --tag flat-tokens:try . > /dev/null

container=$(images from flat-tokens:try)
trap 'images rm "$container" > /dev/null' EXIT
root=$(images mount "$container")
megabytes() { du --summarize --block-size=1000000 --one-file-system "$1" | cut -f 1; }
echo "image: $(megabytes "$root") MB, $(megabytes "$root/opt") MB of them over its base"
within() { images run --user 10001:10001 "$container" -- "$@"; }
within python -m flows build deployments/demo/demo.yaml --no-server --quiet
within python -m flows refresh deployments/demo/demo.yaml --no-server --quiet
within python -m flat_tokens.tools.cli verify demo-output --full
within python deployments/worker.py worker start --help > /dev/null
echo "the image works"
