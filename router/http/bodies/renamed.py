"""Fields under another name: a body that is served as one of another route is refused by its own names."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from ....metadata.errors import RequestError


@contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None]:
    """Let refusals in the block name the client's field. `names`: paths of fields as the block knows them, and as the
    client does. `[]` in both stands for any index."""
    try:
        yield
    except RequestError as error:
        words = str(error)
        for name, shown in names.items():
            pattern = r"\A" + re.escape(name).replace(r"\[\]", r"(\[\d+\])") + r"(?=[:.\[])"
            changed, num_found = re.subn(pattern, shown.replace("[]", r"\1"), words)
            if num_found:
                raise RequestError(changed, param=re.split(r"[.\[]", shown)[0]) from None
        raise
