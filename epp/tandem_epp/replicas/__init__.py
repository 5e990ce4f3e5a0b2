"""Replicas of one EPP, or workers of one router, that know each other's requests.

    shared_fleet   tells the others what this replica places, and applies what they tell
    peers/         the channel between them

Read `shared_fleet` first.
"""
