"""How many more tokens the same text takes after a cut, by language: compute follows that number, rows don't."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tokenalign.training.own_data import read_examples

# One sentence each, of the same everyday kind; they show the order of the effect, a sample of one's own measures it.
SAMPLES = (
    ("English", "Please tell me when my new card will arrive and how much the transfer costs."),
    ("Korean", "새 카드가 언제 도착하는지, 그리고 송금 수수료가 얼마인지 알려 주세요."),
    ("Chinese", "请告诉我新卡什么时候寄到，以及转账需要多少手续费。"),
    ("Japanese", "新しいカードがいつ届くのか、そして送金手数料がいくらか教えてください。"),
    ("German", "Bitte sagen Sie mir, wann meine neue Karte ankommt und was die Überweisung kostet."),
    ("French", "Dites-moi quand ma nouvelle carte arrivera et combien coûte le virement, s'il vous plaît."),
    ("Spanish", "Dígame, por favor, cuándo llegará mi nueva tarjeta y cuánto cuesta la transferencia."),
    ("Russian", "Скажите, пожалуйста, когда придёт моя новая карта и сколько стоит перевод."),
    ("Arabic", "من فضلك أخبرني متى ستصل بطاقتي الجديدة وكم تكلفة التحويل."),
    ("Hindi", "कृपया बताइए कि मेरा नया कार्ड कब आएगा और पैसे भेजने का शुल्क कितना है।"),
    (
        "Python",
        "def total(amounts: list[float]) -> float:\n    return sum(amount for amount in amounts if amount > 0)\n",
    ),
)


@dataclass(frozen=True, slots=True)
class Growth:
    """Tokens of one language's texts before and after; texts: how many."""

    language: str
    texts: int
    before: int
    after: int

    @property
    def ratio(self) -> float:
        """Tokens after by tokens before."""
        return self.after / self.before


def read_samples(path: Path) -> tuple[tuple[str, str], ...]:
    """(language, text) of each row of a JSON Lines, CSV, TSV or Parquet file with columns of these names."""
    return tuple((example.label, example.text) for example in read_examples(path, "text", "language"))


def token_growth(before: Tokenizer, after: Tokenizer, samples: Iterable[tuple[str, str]]) -> list[Growth]:
    """The growth of each language, in the order of their first text; special tokens are not counted."""
    sums: dict[str, list[int]] = {}
    for language, text in samples:
        counts = [len(tokenizer.encode(text, add_special_tokens=False).ids) for tokenizer in (before, after)]
        found = sums.setdefault(language, [0, 0, 0])
        for i, value in enumerate((1, *counts)):
            found[i] += value
    return [Growth(language, *numbers) for language, numbers in sums.items()]
