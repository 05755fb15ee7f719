"""Bugs of one line in tuning."""

from tests.bugs.bug import Bug

CURVE, SEARCH, STUDY, VERDICTS, SETTINGS = (
    f'tests/lm/tuning/test_{name}.py'
    for name in ('curve', 'search', 'study', 'verdicts', 'settings')
)

TUNING = {
    'a vertex beyond divergence': Bug(
        'lm/study/plan/curve.py',
        'high_R = np.where(finite[above_R], k[above_R], k[best_R])',
        'high_R = k[above_R]',
        CURVE,
    ),
    'runs that diverged left out of a mean': Bug(
        'lm/study/plan/curve.py',
        'if is_sound(losses) else math.inf',
        'if math.isfinite(losses[0]) else math.inf',
        CURVE,
    ),
    'a fit that every value weighs alike in': Bug(
        'lm/study/plan/curve.py',
        'w_RK = np.where(near_RK, n, 0.0)',
        'w_RK = np.where(near_RK, 1.0, 0.0)',
        CURVE,
    ),
    'a fit over two octaves of any curve': Bug(
        'lm/study/plan/curve.py',
        'return np.where(np.logical_and(*steep), 1, 2)',
        'return np.where(np.logical_and(*steep), 2, 2)',
        CURVE,
    ),
    'three points whose curvatures nothing ties': Bug(
        'lm/study/plan/curve.py',
        'LEAST_SPREAD = 1e-3',
        'LEAST_SPREAD = 0.0',
        CURVE,
    ),
    'a spread of one value over its own seeds': Bug(
        'lm/study/plan/curve.py',
        'sum(len(x) - 1 for x in kept)',
        'sum(len(x) for x in kept)',
        CURVE,
    ),
    'no allowance where nothing is known': Bug(
        'lm/study/plan/curve.py',
        '        return math.inf\n    return _allowance',
        '        return 0.0\n    return _allowance',
        CURVE,
    ),
    'an allowance without seeds': Bug(
        'lm/study/plan/curve.py',
        '* s / np.sqrt(means.n)',
        '* s',
        CURVE,
    ),
    'values as good beyond divergence': Bug(
        'lm/study/plan/curve.py',
        'return means.mean - means.mean[best] > t * error',
        'return np.where(np.isinf(means.mean), 0, means.mean) - means.mean[best] > t * error',
        CURVE,
    ),
    'arms that need less get fewer runs': Bug(
        'lm/study/plan/search.py',
        'points if arm.is_dead else arm.filled(points, width)',
        'points',
        SEARCH,
    ),
    'a wave that opens before the last has ended': Bug(
        'lm/study/plan/search.py',
        'return found if any(found) else []',
        'return found if all(found) else []',
        SEARCH,
    ),
    'an edge that is given up early': Bug(
        'lm/study/plan/search.py',
        'arm.extensions += kind == EXTEND',
        'arm.extensions += 2 * (kind == EXTEND)',
        f'{SEARCH} -k "never_ends or dead_arm"',
    ),
    'noise that is followed': Bug(
        'lm/study/plan/search.py',
        'beyond = outward if is_found or not arm.extensions else []',
        'beyond = outward',
        SEARCH,
    ),
    'an edge that is taken for a minimum': Bug(
        'lm/study/plan/search.py',
        'return -1 if means.best == 0 else 1 if means.best == len(means.k) - 1 else 0',
        'return -1 if means.best == 0 else 0',
        SEARCH,
    ),
    'values out of bounds': Bug(
        'lm/study/plan/search.py',
        'return [i for i in indices if lowest <= i <= highest]',
        'return list(indices)',
        SEARCH,
    ),
    'a budget that is exceeded by a wave': Bug(
        'lm/study/plan/search.py',
        'if self.runs + width > self.search.most_runs:',
        'if self.runs >= self.search.most_runs:',
        SEARCH,
    ),
    'a scan that says it is refined': Bug(
        'lm/study/plan/search.py',
        "self.is_refined |= stage == 'refine'",
        'self.is_refined = True',
        SEARCH,
    ),
    'a minimum that is forgotten between two lines': Bug(
        'lm/study/plan/search.py',
        '            found = self.centre\n        elif',
        '            found = self.best_place\n        elif',
        SEARCH,
    ),
    'flat beyond what was tried': Bug(
        'lm/study/plan/search.py',
        'min(high, int(means.k[-1])) - max(low, int(means.k[0]))',
        'high - low',
        f'{SEARCH} -k edge',
    ),
    'fields that do not interact': Bug(
        'lm/study/plan/surface.py',
        'hessian_FF[i, j] = hessian_FF[j, i] = product',
        'hessian_FF[i, j] = hessian_FF[j, i] = 0.0',
        SEARCH,
    ),
    'worse by the seeds alone': Bug(
        'lm/study/statistics.py',
        '_t(d.mean() - r, se)',
        '_t(d.mean(), se)',
        VERDICTS,
    ),
    'better by the allowance of the arm': Bug(
        'lm/study/statistics.py',
        '_t(-(d.mean() + r_baseline), se)',
        '_t(-(d.mean() + r), se)',
        VERDICTS,
    ),
    'one-sided p-values': Bug(
        'lm/study/statistics.py',
        'min(1.0, 2 * float(special.stdtr(freedom, -t)))',
        'min(1.0, float(special.stdtr(freedom, -t)))',
        VERDICTS,
    ),
    "Bonferroni for Holm's": Bug(
        'lm/study/statistics.py',
        '(len(tests) - rank) * p_values[i]',
        'len(tests) * p_values[i]',
        VERDICTS,
    ),
    'two looks at five percent each': Bug(
        'lm/study/statistics.py',
        'LEVEL = 0.027',
        'LEVEL = 0.05',
        VERDICTS,
    ),
    'blocks that are no blocks': Bug(
        'lm/study/statistics.py',
        'losses_AS - losses_AS.mean(0) - losses_AS.mean(1, keepdims=True) + losses_AS.mean()',
        'losses_AS - losses_AS.mean(1, keepdims=True)',
        VERDICTS,
    ),
    'an edge with an allowance': Bug(
        'lm/study/verdicts.py',
        '[math.inf if EDGE in pick.states else pick.allowance for pick in self.picks]',
        '[pick.allowance for pick in self.picks]',
        STUDY,
    ),
    'verdicts from the seeds that chose': Bug(
        'lm/study/verdicts.py',
        'Point(pick.k, FRESH + i)',
        'Point(pick.k, i)',
        STUDY,
    ),
    'a second look at all arms': Bug(
        'lm/study/verdicts.py',
        'bool(one and one.verdict and one.verdict.said == UNDECIDED) and can\n',
        'bool(one and one.verdict) and can\n',
        STUDY,
    ),
    'means over seeds that diverged': Bug(
        'lm/study/verdicts.py',
        'bool(len(own)) and bool(np.all(np.isfinite(own)))',
        'bool(len(own))',
        STUDY,
    ),
    'seeds needed without the allowance': Bug(
        'lm/study/verdicts.py',
        'effect -= self._allowed(arm, one.verdict)',
        'effect -= 0',
        STUDY,
    ),
    'a budget without its fresh seeds': Bug(
        'lm/study/plan/settings.py',
        'self.budget - self.seeds',
        'self.budget',
        SETTINGS,
    ),
    'a decay that does not move with the rate': Bug(
        'lm/study/plan/settings.py',
        'index[DECAY] -= index[LR]',
        'index[DECAY] -= 0',
        SETTINGS,
    ),
    'a value beyond its bound': Bug(
        'lm/study/plan/settings.py',
        '- bound) * inward < 0',
        '- bound) * inward < -bound',
        SETTINGS,
    ),
}
