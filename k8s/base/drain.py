"""Before a worker pod ends: asks Ray to move its replicas elsewhere, and waits until none is left or time is up.

Kubernetes runs it in the pod (preStop), sends SIGTERM to Ray when it returns, and kills what outlives
terminationGracePeriodSeconds. It ends with 0 whatever happened: the pod ends in any case.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import psutil

ASK_LIMIT_S = 20.0
POLL_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """0, once the replicas are gone or the deadline has passed."""
    parser = argparse.ArgumentParser(description="Drain this Ray node.")
    parser.add_argument("--deadline-s", type=float, required=True, help="how long the replicas have to move")
    limit_s = parser.parse_args(arguments).deadline_s
    until = time.monotonic() + limit_s
    commands = list(command_lines())
    node = node_id(commands)
    if node is None or not has_replica(commands):
        return 0
    ask_to_drain(node, round(limit_s))
    wait_until(lambda: not has_replica(command_lines()), until)
    return 0


def command_lines() -> Iterable[list[str]]:
    """The arguments of every process that can be seen, which in a pod are its own."""
    for process in psutil.process_iter():
        try:
            yield process.cmdline()
        except psutil.Error:
            continue


def node_id(commands: Iterable[list[str]]) -> str | None:
    """The hex id of the Ray node whose raylet is among the processes; None where there is none."""
    for command in commands:
        if command and command[0].endswith("/raylet"):
            for argument in command[1:]:
                if argument.startswith("--node_id="):
                    return argument.removeprefix("--node_id=")
    return None


def has_replica(commands: Iterable[list[str]]) -> bool:
    """Whether a replica of Ray Serve is among the processes: Ray names them in their titles."""
    return any(command and command[0].startswith("ray::ServeReplica:") for command in commands)


def ask_to_drain(node: str, deadline_s: int) -> bool:
    """Whether Ray takes the node out of service. Serve then starts each replica elsewhere before it ends it here."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is ending"]
    command += ["--deadline-remaining-seconds", str(deadline_s)]
    try:
        subprocess.run(command, check=True, timeout=ASK_LIMIT_S)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"drain: Ray was not told: {error}", file=sys.stderr)
        return False
    return True


def wait_until(done: Callable[[], bool], until: float) -> bool:
    """Whether `done` became true before the monotonic time `until`."""
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__main__":
    sys.exit(main())
