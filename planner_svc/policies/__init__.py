"""Placement policies: pure functions from loads, the placement in force and the ranks to a plan.

Layers, each importing only those above it:

    problem       what a policy is given and what it returns
    checks        what goes in is cleaned, what comes out is verified
    repair        any rows made a sound plan, with few changes
    uniform       without loads; how slots are shared out
    eplb          ``hierarchical`` and ``global``: DeepSeek's published balancer
    threshold     one replica more or less at a time
    mesh          ours, the default
    registry      from the settings to the policy
"""
