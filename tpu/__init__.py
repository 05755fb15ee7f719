"""Accelerators that nobody here holds: `tpu.plan` compiles a training step for them, and
`tpu.launch` starts trainings on them. Users call these two commands, and nothing else imports the
room but tests. It calls `lm` for configs, meshes, programs and exit statuses, and
`eval.charts` for figures.
"""
