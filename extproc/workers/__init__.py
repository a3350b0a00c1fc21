"""Several worker processes behind one port, and one router.

Theory of operation
-------------------
A request's cost is in reading it: gRPC, protobuf, JSON, hashing. Deciding is little, and wants all loads in one place.
So workers read, each on a core of its own, and ask the parent, where there is one `Router` as without workers: each
decision sees all requests before it, whichever worker they came by.

    worker    connections from Envoy, ext_proc streams, features       asks; tells when an answer begins, a stream ends
    parent    membership, load, health, decisions, leases, endpoint    decides; says whether the fleet is known; hands
              discovery, metrics, spans, admin port                    over connections

    link        messages over a Unix socket
    words       what they say
    remote      the worker's picker and endpoint discovery, which ask the parent, and its calls, which wait for it
    desk        the parent's answers to one worker
    worker      the process that serves
    supervisor  the parent's port and its workers: starts, feeds and replaces them

An Envoy opens a connection for each of its threads and keeps it, and a kernel that spreads connections over listening
processes may give them all to one. So the parent accepts, and hands each to the worker that has the least; and where
one has two more than another, which has just been started, it sends one away to come again.

A stream's call waits for its answer in a greenlet, since the exchange and all below it know no waiting. So the loop
goes on, and questions that arise together travel together: to wake another process costs as much as half a decision.
Where no answer comes in time, the request goes unrouted, to Envoy's own fallback; then nobody asks until the parent
says something again.

A worker that dies takes its connections with it. Its requests that were routed run on, its leases are released at
once. Workers whose parent dies end.
"""
