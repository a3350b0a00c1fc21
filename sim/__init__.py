"""A fleet in virtual time: discrete events that drive the real `extproc.core`, to measure routing without a GPU.

Read the files in the order in which data flows:

    transcript  what a prompt looks like: to the router (a ladder of signatures), to an engine (blocks)
    turn        one request of a workload, and its visit to a replica
    trace       turns from a file in Mooncake's format
    workload    turns that are generated: chats, agents, shared prompts, bursts, one hot prefix
    engine      one replica: continuous batching, chunked prefill, prefix cache, preemption
    policies    who gets the next turn: ours through extproc.core, and peers' from their published descriptions
    fleet       the event loop: arrivals, engines, polls
    report      what came of it
    results, plot, cli
    script, performance, replay   the same turns as real requests, through a real Envoy

The router is shown what it sees in production and nothing else: its own decisions, the ends of streams, first-token
signals if there are any, and the engines' metrics every half second.
"""
