"""How a head is trained: the choices, and nothing of the code that carries them out."""

from dataclasses import dataclass
from typing import Literal

from tokenalign.errors import TrainingError

BANKING_TEMPLATE = "The customer's banking issue concerns {label}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to train a head.

    name: how it is asked for
    label_groups: labels of Banking77 for training, validation and test
    label_template: what a label is put into wherever the head is used, validation included
    wordings: what a label is put into in training, one drawn for each label and batch
    shared_wording: whether all labels of an episode are put into the same one
    described: whether labels are trained on by their descriptions too, see `descriptions`; where they are put into
        wording number w, it is description number w, the name being the first
    clinc150_domains: domains of CLINC150 whose messages are trained on beside Banking77's
    start: "random" weights, or "geometry": the head begins as the encoder's own geometry, see `initialisation`
    start_pooled_share: of the geometry start: how much of the mean of its text is added to each token's row
    start_scale: the scale of the logits at the start
    trained: "everything"; or "comparison": one matrix for both queries and keys, and the scale, while projection and
        blocks stay as the start has them, so that a token's row is computed once
    learning_rate, weight_decay, clip_norm: of AdamW and of the gradient's norm
    schedule: "constant", or "cosine": a linear rise over a tenth of the first epochs' batches, then a cosine to a
        twentieth of the learning rate over all `max_epochs`
    batch_size: messages of a batch
    max_epochs, patience: training ends there, or after `patience` epochs without a lower validation NLL
    min_improvement: by how many nats lower it must be to count; the weights kept are those of the lowest all the same
    epoch_batches: batches of an epoch, drawn so that labels come equally often; None: every message once an epoch
    candidates: labels of each source that are drawn as a batch's candidates; None: all training labels
    episodes: 0, and all of a batch's candidates compete; else a batch is made up of so many episodes, each with the
        labels and messages of one source or domain of CLINC150, which compete among themselves alone
    banking77_weight: how much more often than one domain Banking77 is drawn for an episode
    other_texts: training messages that a batch's messages are matched with as if they were labels, the ones of their
        own label being right
    other_texts_weight: of that loss
    teacher_weight, teacher_scale: of the divergence from the softmax over teacher_scale · cosine of mean-pooled vectors
    average_decay: of the running average of the weights, which is what is validated and kept; 0: the weights
    keep: "best", the epoch of lowest validation NLL, or "last"
    """

    name: str
    label_groups: tuple[int, int, int] = (50, 12, 15)
    label_template: str
    wordings: tuple[str, ...]
    shared_wording: bool = False
    described: bool = False
    clinc150_domains: tuple[str, ...] = ()
    start: Literal["random", "geometry"]
    start_pooled_share: float = 0.0
    start_scale: float = 10.0
    trained: Literal["everything", "comparison"] = "everything"
    learning_rate: float
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    schedule: Literal["constant", "cosine"] = "constant"
    batch_size: int = 32
    max_epochs: int = 50
    patience: int = 8
    min_improvement: float = 0.0
    epoch_batches: int | None = None
    candidates: int | None = None
    episodes: int = 0
    banking77_weight: float = 1.0
    other_texts: int = 0
    other_texts_weight: float = 0.0
    teacher_weight: float = 0.0
    teacher_scale: float = 20.0
    average_decay: float = 0.0
    keep: Literal["best", "last"] = "best"


BANKING77_RECIPE = Recipe(
    name="banking77",
    label_template=BANKING_TEMPLATE,
    wordings=(BANKING_TEMPLATE,),
    start="random",
    learning_rate=3e-4,
)
"""The protocol of the model card, Training data and protocol."""

INTENTS_RECIPE = Recipe(
    name="intents",
    label_template="{label}",
    wordings=(
        "{label}",
        BANKING_TEMPLATE,
        "This message is about {label}.",
        "The user is asking about {label}.",
        "I need help with {label}.",
        "A question about {label}.",
        "topic: {label}",
        "I want to talk about {label}",
    ),
    # kitchen_and_dining and work stay out to tell how the head does on domains it never saw; banking and credit_cards
    # overlap Banking77, whose labels are the zero-shot test.
    clinc150_domains=("auto_and_commute", "home", "meta", "small_talk", "travel", "utility"),
    start="geometry",
    start_scale=20.0,
    learning_rate=1e-3,
    schedule="cosine",
    batch_size=64,
    max_epochs=3,
    epoch_batches=100,
    candidates=40,
    other_texts=32,
    other_texts_weight=0.5,
    teacher_weight=0.5,
    teacher_scale=20.0,
    average_decay=0.99,
)
"""Of the shipped default head, chosen on validation labels."""

TRANSFER_RECIPE = Recipe(
    name="transfer",
    label_template="{label}",
    wordings=("{label}",) * 5,
    shared_wording=True,
    described=True,
    clinc150_domains=(*INTENTS_RECIPE.clinc150_domains, "kitchen_and_dining", "work"),
    start="geometry",
    start_pooled_share=2.0,
    start_scale=20.0,
    trained="comparison",
    learning_rate=2e-3,
    schedule="cosine",
    batch_size=144,
    max_epochs=2,
    epoch_batches=100,
    candidates=40,
    episodes=3,
    banking77_weight=3.0,
    other_texts=45,
    other_texts_weight=0.5,
    average_decay=0.98,
    keep="last",
)
"""For domains far from the training data: little is learnt, and that carries further. `studies` has how far."""

RECIPES = {recipe.name: recipe for recipe in (BANKING77_RECIPE, INTENTS_RECIPE, TRANSFER_RECIPE)}


def recipe_named(name: str) -> Recipe:
    """The built-in recipe of that name; `TrainingError` lists what there is."""
    try:
        return RECIPES[name]
    except KeyError as error:
        raise TrainingError(f"recipe {name!r} is unknown; choose one of {', '.join(sorted(RECIPES))}") from error
