"""Tests of the fleet: the routing rule, the index, and fleets in virtual time."""
