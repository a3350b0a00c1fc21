"""The decision: which replica gets a request, and what is known afterwards.

Theory of operation. Read the files in the order in which data flows:

    request     what is seen of an HTTP request
    api         which dialect it speaks
    document    the JSON of its body, also where only the head was seen
    mask        spans that change from request to request and should not count
    prompt      the body as one canonical byte stream, in the order in which a chat template renders it
    session     the client's own name for the conversation, if it gives one
    ladder      BLAKE3 of that stream, read off at growing offsets: a dozen signatures stand for any prompt
    features    all of this together
    known       what was last read of a session, for turns whose body need not be
    replica     who can serve, and what its engine says of itself
    ring        a weighted consistent-hash ring: where a key lives when nothing else is known
    placement   what is remembered of where a signature went
    load        in-flight requests and outstanding prefill of one replica
    pool        the replicas that serve one model: their ring, their loads, the least loaded of them
    lease       a decision's claim on its replica, until the stream ends
    policy      weighs candidates by expected work (and two simpler rules for comparison)
    decision    the outcome, with its reason
    settings    what an operator can set
    router      all of it in one object: decide, first_token, finish

Nothing here does I/O, reads a clock, sleeps, logs or knows threads: `now_s` (monotonic seconds) is an argument, and
between reading a load and taking a lease nothing else can run.
"""
