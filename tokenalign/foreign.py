"""Heads that another program wrote: brought to our names, or refused with a list of what is missing."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ForeignOverrides:
    """The user's own word on a foreign head, stronger than any synonym.

    config: our configuration keys with their values, for example `{"heads": 4, "document_template": "{text}"}`
    tensors: our tensor names with the foreign names to take them from
    """

    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
