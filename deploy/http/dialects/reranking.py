"""What reranking dialects share: the query is the label, the documents are the texts, and their alignment is the score.

relevance[d] = mean over the query's tokens i of max over the document's tokens j of q[i]·k[j]. That is the native logit
without its scale: logit / `logit_scale` of `GET /v1/model`. It is a mean of cosines and lies in [-1, 1]; what dialects
call a score is that, with negative values at 0. One query is enough: there is no softmax, and no score depends on the
other documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.http.dialects.seam import Call, Place


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document's place in the ranking.

    index: position in the request; logit: as in the native answer; truncation: likewise
    """

    index: int
    relevance: float
    logit: float
    truncation: dict[str, int] | None

    @property
    def score(self) -> float:
        """The relevance within [0, 1]."""
        return min(1.0, max(0.0, self.relevance))


def rerank_call(query: str, documents: Sequence[str], place: Place, model: str | None = None) -> Call:
    """The reranking request in native terms. A query is asked once, so it leaves nothing in the store."""
    body = {"texts": list(documents), "labels": [query], "return_logits": True, "model": model}
    return Call(body, place, keep_labels=False)


def ranking(results: Sequence[dict[str, Any]], logit_scale: float) -> list[Ranked]:
    """The documents, best first, ties in the caller's order; results: of the native answer."""
    ranked = [
        Ranked(i, result["scores"][0]["logit"] / logit_scale, result["scores"][0]["logit"], result["truncation"])
        for i, result in enumerate(results)
    ]
    return sorted(ranked, key=lambda document: -document.logit)
