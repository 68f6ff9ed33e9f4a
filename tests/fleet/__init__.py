"""Tests of the fleet: the rule, the index, and fleets played in virtual time."""
