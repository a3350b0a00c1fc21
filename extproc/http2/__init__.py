"""gRPC over HTTP/2 as far as a server needs it that is called by Envoy, without gRPC's own threads.

    asyncio  ->  listener   sockets, TLS, keepalive, the way out
                    |  bytes, both ways
                 connection frames, flow control, streams         RFC 9113
                    |-- headers    their compression              RFC 7541
                    |-- stream     a call's messages in frames    grpc/doc/PROTOCOL-HTTP2.md
                    |  messages, both ways
                 extproc.call   messages in, messages out         grpc/doc/PROTOCOL-HTTP2.md

Why not grpcio: its core hands every event from threads of its own to the event loop, which costs more than all that
this router does with a request (docs/performance.md).
"""
