#!/bin/sh
# archive.sh COMMIT: writes protocol-N.tar.xz, with what the router and the nodes of this commit need. N is the newest
# protocol that they speak. The demo model, its training and benchmarks are left out.
set -e
cd "$(git rev-parse --show-toplevel)"
newest=$(git grep -h '^PROTOCOL_MAX = ' "$1" -- metadata | sed 's/^PROTOCOL_MAX = \([0-9]*\).*/\1/')
folders="__init__.py router prefill_node decode_node metadata engine kernels deploy"
files=$(git ls-tree -r --name-only "$1" -- $folders | grep '\.py$' |
    grep -v '^deploy/\(acceptance\|bench\|chat\|demo/\|explain\|launcher\|planted\|roofline\|synthetic\)')
git archive --prefix=baton/ "$1" $files | xz -9e > "tests/releases/protocol-${newest:?}.tar.xz"
