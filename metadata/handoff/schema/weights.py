"""Two models' fingerprints in words. A fingerprint is a digest, and behind a space the quantization if there is one:

    697e0c1a5b3f4d2e8a90b1c2d3e4f506 fp8 online

Nodes and the router compare the whole of it. The words are for the reader of a refusal. Imports no torch, because the
router refuses nodes.
"""

from __future__ import annotations


def difference(name: str, here: str | None, there: str | None) -> list[str]:
    """Return one phrase that names both fingerprints ("weights: 12 (fp8 online) here, 34 (not quantized) there"); none
    if they are equal. None: there are no weights."""
    if here == there:
        return []
    is_quantized = any(each is not None and " " in each for each in (here, there))
    words = [_words(each) if is_quantized else str(each) for each in (here, there)]
    return [f"{name}: {words[0]} here, {words[1]} there"]


def _words(fingerprint: str | None) -> str:
    if fingerprint is None:
        return "None"
    digest, _, quantization = fingerprint.partition(" ")
    return f"{digest} ({quantization or 'not quantized'})"
