"""Makes a process log its outbound calls: Python imports this file at startup if PYTHONPATH has its folder."""

import sys


def _tell(event: str, arguments: tuple) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"):
        if event == "socket.connect" and "/jaxllm-grpc-" in str(arguments[-1]):
            return  # from the gRPC proxy process to the server
        print("outbound", event, arguments[-1] if event == "socket.connect" else arguments[:2], file=sys.stderr)


sys.addaudithook(_tell)
