"""A DNS server on 127.0.0.1 that knows one name: dns.py NAME ADDRESS. Prints a line once it listens."""

import socket
import sys

name, address = sys.argv[1], socket.inet_aton(sys.argv[2])
known = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("ready", flush=True)
while True:
    query, peer = server.recvfrom(512)
    # The question: labels, up to an empty one, then a type and a class.
    end = query.index(b"\0", 12) + 1
    question, kind = query[12:end], query[end : end + 2]
    found = question.lower() == known
    answer = b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04" + address if found and kind == b"\0\x01" else b""
    flags = b"\x81\x80" if found else b"\x81\x83"
    counts = b"\0\x01" + (b"\0\x01" if answer else b"\0\0") + b"\0\0\0\0"
    server.sendto(query[:2] + flags + counts + query[12 : end + 4] + answer, peer)
