"""One rank of a :class:`cluster.Cluster`: runs the functions that it is sent."""

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Client


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = Client(sys.argv[1], "AF_UNIX")
    connection.send((int(os.environ.get("BYTEPS_LOCAL_RANK", "0")), os.getpid()))
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if call is None:
            return
        function, arguments = call
        try:
            result = True, function(*arguments)
        except BaseException:  # Also what pytest.raises raises.
            result = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(result))


main()
