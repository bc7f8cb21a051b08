"""`python old_version.py ...`: the `baton` command as it was before protocol 5.

What protocol 5 brought is taken out before anything else is imported: the node says that it knows protocol 4 alone,
and cannot decode the message that came later.
"""

import sys
from typing import Union, get_args

import msgspec

from baton.metadata import messages

OLD = 4


def forget() -> None:
    """Takes protocol 5 out of this process."""
    assert (messages.PROTOCOL_MIN, messages.PROTOCOL_MAX) == (OLD, 5), "another protocol: say here what it brought"
    messages.PROTOCOL_MAX = OLD
    kinds = [kind for kind in get_args(messages.ToDecode) if kind is not messages.DeviceWelcome]
    messages.to_decode_decoder = msgspec.msgpack.Decoder(Union[tuple(kinds)])  # noqa: UP007


if __name__ == "__main__":
    forget()
    from baton.deploy.cli import main

    sys.exit(main())
