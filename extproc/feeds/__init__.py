"""Where the fleet is learned from: one file per source, each behind `MembershipFeed`, and what engines say of load."""
