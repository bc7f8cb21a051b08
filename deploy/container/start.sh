#!/bin/sh
# The first process of a node's container: gives an empty cache the kernels that the image has compiled, and becomes
# `baton`, which thereby gets the container's signals. The root file system may be read-only.
cp -Rpn /opt/baton/cache/. "$XDG_CACHE_HOME/" || echo "start.sh: $XDG_CACHE_HOME cannot be written: kernels will be compiled at each start" >&2
exec /opt/baton/bin/baton "$@"
