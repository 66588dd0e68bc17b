"""The paper's experiment: its rows, how they are trained and measured, the records, and the jobs that make them.

rows        the table as data                     measure     what is measured of a trained network
config      all that determines a training        files       atomic writes, checkpoints, weights
train       the equations of training             records     records that prove themselves
run         one training, from start to record    results     tables and figures of the records
batch       which trainings are missing           notebooks   executes notebooks, one or all
"""
