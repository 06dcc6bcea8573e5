"""`tokenalign-deploy bulk`: what `tokenalign batch` does, by the nodes of a Ray cluster."""

import argparse
import logging
import os
from collections.abc import Sequence

from tokenalign.bulk.commands import add_job_options, add_model_options, job_of, model_options, run_and_tell
from tokenalign.errors import InputError

DESCRIPTION = """\
Classify the texts of a file on a Ray cluster. Input, output, side file and exit status are those of `tokenalign batch`.
The input must be at the same path on every node; the output is written by this process."""


def run_bulk_command(arguments: Sequence[str]) -> int:
    """The exit status of `bulk` with these arguments; errors are `TokenAlignError`s."""
    options = _parser().parse_args(arguments)
    job, model = job_of(options), model_options(options)
    if options.actors < 1 or (options.max_actors or options.actors) < options.actors:
        raise InputError(f"--actors is {options.actors}; give at least 1, and no more than --max-actors", ("actors",))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    from deploy.bulk import ActorPool, run_on_ray

    pool = ActorPool(
        options.actors, options.max_actors or options.actors, options.cpus_per_actor, options.gpus_per_actor
    )
    try:
        ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise InputError(
            f"no cluster at {options.address!r}: {error}; give its address (with RAY_AUTH_MODE=token where it has a "
            "token), or local for this machine",
            ("address",),
        ) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        return run_and_tell(
            job,
            lambda on_progress, on_warnings: run_on_ray(
                job, model, pool, on_progress=on_progress, on_warnings=on_warnings
            ),
        )
    finally:
        ray.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenalign-deploy bulk", description=DESCRIPTION)
    add_job_options(parser)
    add_model_options(parser)
    parser.add_argument("--address", default="auto", help="of the cluster, or local (default: the running one)")
    parser.add_argument("--actors", type=int, default=1, help="that hold the model (default: %(default)s)")
    parser.add_argument("--max-actors", type=int, help="start more when there is room (default: as many as --actors)")
    parser.add_argument("--cpus-per-actor", type=float, default=1.0, help="default: %(default)g")
    parser.add_argument("--gpus-per-actor", type=float, default=0.0, help="default: %(default)g")
    return parser
