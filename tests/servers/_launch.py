"""Become another user, ask to die with the parent, and turn into the given command.

Run as a script (``python _launch.py PARENT_PID UID COMMAND…``; UID ``-`` keeps the user). A process
of its own instead of ``preexec_fn``: that one is unsafe, and warns, once there are threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns."""
    parent, uid, *command = sys.argv[1:]
    if uid != "-":
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    if sys.platform == "linux":
        # After the change of user, which would clear it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(parent):
            sys.exit("the parent has already gone")
    os.execv(command[0], command)  # noqa: S606 - that is its purpose


if __name__ == "__main__":
    main()
