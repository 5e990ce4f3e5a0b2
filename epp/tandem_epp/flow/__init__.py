"""Flow control: requests that no pod has room for wait here, the important first.

`queue` says who goes next, `saturation` whether a pod has room, and `flows` what follows from both,
with what waits `elsewhere`, all pure; `control` has the tasks, timers and answers. Read `flows`
first.
"""
