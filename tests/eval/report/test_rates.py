"""Reference: the table of losses by learning rate, on a sweep with known numbers."""

import pytest

from eval.report.page import write_report
from eval.report.tables import rates_table
from tests.eval import sweep_fixture as fixture


def mean_text(norm, lr, seeds):
    """Returns the mean of the final losses, to three digits."""
    axes = zip(fixture.AXES, (norm, lr), strict=False)
    base = fixture.update_config(fixture.base_config(), dict(axes))
    ends = [fixture.final_ce(fixture.update_config(base, {'train.seed': seed})) for seed in seeds]
    return f'{sum(ends) / len(ends):.3f}'


def test_means_over_finished_seeds_and_divergences(sweep):
    head, *rows = rates_table(fixture.compare_sweep(sweep), 'ce')
    assert head == ['variant', '0.001', '0.003', '0.01', '0.03']
    assert rows == [
        [
            'rmsnorm',
            mean_text('rmsnorm', 0.001, (0, 1, 2)),
            f'**{mean_text("rmsnorm", 0.003, (0, 1, 2))}**',
            mean_text('rmsnorm', 0.01, (0, 1, 2)),
            mean_text('rmsnorm', 0.03, (0, 1)),
        ],
        [
            'layernorm',
            mean_text('layernorm', 0.001, (0, 1, 2)),
            f'**{mean_text("layernorm", 0.003, (0, 1, 2))}**',
            mean_text('layernorm', 0.01, (0, 1)),
            f'{mean_text("layernorm", 0.03, (1,))} (1)',
        ],
    ]


def test_table_has_no_mean_if_every_run_diverged(tmp_path):
    fates = {('rmsnorm', 0.03, seed): 'diverged' for seed in fixture.SEEDS}
    fixture.write_sweep(tmp_path / 'sweep', fixture.AXES, fates)
    _, first, _ = rates_table(fixture.compare_sweep(tmp_path / 'sweep'), 'ce')
    assert first[-1] == '(3)'


@pytest.mark.full
def test_report_has_table_for_swept_rates(sweep, tmp_path):
    write_report(sweep, tmp_path / 'page.html')
    assert '## By learning rate' in (tmp_path / 'page.md').read_text()
    fixture.write_sweep(tmp_path / 'one', fixture.AXES | {'optim.lr': (0.003,)}, {})
    write_report(tmp_path / 'one')
    assert '## By learning rate' not in (tmp_path / 'one' / 'report.md').read_text()
