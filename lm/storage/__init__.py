"""Files and buckets: atomic writes, locks, object storage, its complete folders and leases.

lm.launch, lm.data, lm.record, lm.inference, lm.run, lm.study and eval may call this room. It may
call no other room of lm.
"""
