"""Bugs of one line in the board of claims."""

from tests.bugs.bug import Bug

CLAIM, DECIDE, OPTIMIZERS = (
    f'tests/eval/claims/{name}.py'
    for name in ('test_claim', 'test_decide', 'measures/test_optimizers')
)

CLAIMS = {
    'a claim that holds by the value alone': Bug(
        'eval/claims/estimates.py',
        'if low <= self.low and self.high <= high:',
        'if low <= self.value <= high:',
        DECIDE,
    ),
    'a claim that fails where it is not known to hold': Bug(
        'eval/claims/estimates.py',
        'FAILS if self.low > high or self.high < low else UNDECIDED',
        'FAILS',
        DECIDE,
    ),
    'a claim reproduced where all of it fails': Bug(
        'eval/claims/decide.py',
        'if FAILS in said else REPRODUCED',
        'if False else REPRODUCED',
        DECIDE,
    ),
    'a verdict of an unfinished study': Bug(
        'eval/claims/decide.py',
        'UNFINISHED = (STALE, OPEN, OUT_OF_REACH)',
        'UNFINISHED = (STALE, OUT_OF_REACH)',
        DECIDE,
    ),
    'a verdict that stands where its claim withdraws it': Bug(
        'eval/claims/decide.py', '    if claim.withdrawn:\n', '    if False:\n', DECIDE
    ),
    'claims by computing alone among those by training': Bug(
        'eval/claims/board.py',
        'if (own := [one for one in standing if one.trains == trains])',
        'if (own := standing)',
        DECIDE,
    ),
    'a record of other conditions': Bug(
        'eval/claims/record.py',
        "if row is None or row['asked'] != claim.asked:",
        'if row is None:',
        DECIDE,
    ),
    'seeds for the further end of a range': Bug(
        'eval/claims/decide.py', 'nearest, end = min(', 'nearest, end = max(', DECIDE
    ),
    'conditions of which some bounds have no digest': Bug(
        'eval/claims/claim.py',
        'found = [self.studies, *(dataclasses.asdict(one) for one in self.conditions)]',
        'found = [self.studies, *(one.of for one in self.conditions)]',
        CLAIM,
    ),
    'a range that everything is in': Bug(
        'eval/claims/claim.py',
        'if not low < high or',
        'if not low <= math.inf or',
        CLAIM,
    ),
    'a diverged arm that is equal to one that is not': Bug(
        'eval/claims/evidence.py',
        'if dead != other_dead:',
        'if dead and other_dead:',
        DECIDE,
    ),
    'a measure that was changed since': Bug(
        'eval/claims/evidence.py',
        "if record['code'] != measure.code:",
        "if record['code'] == '':",
        DECIDE,
    ),
    'a study on a pod that is trained here': Bug(
        'eval/claims/evidence.py',
        'return _planned(study) if topology else study',
        'return study',
        DECIDE,
    ),
    'a plan of another study': Bug(
        'eval/claims/evidence.py',
        'asked = json.dumps([cell.name for cell in self.arms.first] + [self.arms.record()])',
        "asked = ''",
        DECIDE,
    ),
    'what counts put on record again': Bug(
        'eval/claims/register.py',
        'return entries | new',
        'return new | {claim.name: {"asked": claim.asked, "day": day, "fresh_seeds": 0} for '
        'claim in claims}',
        DECIDE,
    ),
    'a study that counts for each of its claims': Bug(
        'eval/claims/board.py',
        'studies = {s.name: s for one in found for s in one.evidence.values()}.values()',
        'studies = [s for one in found for s in one.evidence.values()]',
        DECIDE,
    ),
    'the loss before the last step': Bug(
        'eval/claims/measures/perceptron.py',
        'jnp.maximum(largest, value)',
        'value',
        OPTIMIZERS,
    ),
    'as many positives as negatives are asked': Bug(
        'eval/claims/measures/perceptron.py',
        'above[:positives]',
        'above[: POINTS - positives]',
        OPTIMIZERS,
    ),
    'normalized descent that is plain': Bug(
        'modules/optim/variants.py',
        'factor = divide_or_zero(1, q)',
        'factor = 1.0',
        OPTIMIZERS,
    ),
    'accuracy lost in points': Bug(
        'eval/claims/measures/ghosts.py',
        'lost = 1 - after / before[:, None]',
        'lost = before[:, None] - after',
        OPTIMIZERS,
    ),
    'a chain along the rows': Bug(
        'eval/claims/measures/ghosts.py',
        '(likely, other))[1].T',
        '(likely, other))[1].reshape(ROWS, LENGTH + 1)',
        OPTIMIZERS,
    ),
    'state of all but hidden matrices': Bug(
        'eval/claims/measures/memory.py', "== 'hidden'}", "!= 'hidden'}", OPTIMIZERS
    ),
    'momentum of embeddings in SCALE': Bug(
        'modules/optim/classic.py',
        "zeros('momentum')(spec, weight) if spec.role == 'readout' else {}",
        "zeros('momentum')(spec, weight) if spec.role != 'hidden' else {}",
        OPTIMIZERS,
    ),
    'the first of many updates': Bug(
        'eval/claims/measures/updates.py', 'grads)[1][-1]', 'grads)[1][0]', OPTIMIZERS
    ),
    'a spectrum of the square of the condition': Bug(
        'eval/claims/measures/updates.py',
        'np.geomspace(1, 1 / CONDITION, rank)',
        'np.geomspace(1, CONDITION**-2, rank)',
        OPTIMIZERS,
    ),
    'AuON of length 1': Bug(
        'modules/optim/muon.py',
        'return matrices / brake',
        'return unit / brake',
        OPTIMIZERS,
    ),
    'layers as one matrix': Bug(
        'eval/claims/measures/effective_rates.py',
        'axis=(-2, -1)) for x',
        'axis=(-3, -2, -1)) for x',
        OPTIMIZERS,
    ),
    'embeddings among hidden matrices': Bug(
        'eval/claims/measures/effective_rates.py',
        "if spec.role == 'hidden':",
        "if spec.role != 'vector':",
        OPTIMIZERS,
    ),
    'the embeddings as what blocks add': Bug(
        'eval/claims/measures/depths.py',
        'return squares_SL[:, 1:] - squares_SL[:, :1]',
        'return squares_SL[:, 1:]',
        'tests/eval/claims/measures/test_depths.py',
    ),
    'marginals behind a causal mask': Bug(
        'eval/claims/measures/marginals.py',
        'prefix_BT=jnp.ones_like(seen_BT)',
        'prefix_BT=jnp.zeros_like(seen_BT)',
        'tests/eval/claims/measures/test_marginals.py -k every_place',
    ),
    'parts of rows that do not come first': Bug(
        'eval/claims/measures/marginals.py',
        'LENGTH * ~is_seen_BT',
        'LENGTH * is_seen_BT',
        'tests/eval/claims/measures/test_marginals.py -k judged_by_what_is_seen',
    ),
    'regions on one side of each wall': Bug(
        'eval/claims/measures/lipschitz.py',
        'for sign in (1, -1)',
        'for sign in (1,)',
        'tests/eval/claims/measures/test_lipschitz.py',
    ),
    'effects of documents added to what a model gives': Bug(
        'eval/suites/datamodels.py',
        'return outputs - datamodel.effects[forgotten].sum(0)',
        'return outputs + datamodel.effects[forgotten].sum(0)',
        'tests/eval/suites/test_datamodels.py',
    ),
    'KLoM of retrained models against unlearned ones': Bug(
        'eval/suites/datamodels.py',
        'for x in (unlearned_R, retrained_R)]',
        'for x in (retrained_R, unlearned_R)]',
        'tests/eval/suites/test_datamodels.py',
    ),
    'ascent on points to retain': Bug(
        'eval/claims/measures/datamodels.py',
        'forgotten = rows_M[:FORGOTTEN]',
        'forgotten = rows_M',
        'tests/eval/claims/measures/test_datamodels.py',
    ),
    'a study that is stale by a field that came later': Bug(
        'eval/claims/evidence.py',
        'found = [*without_mesh(differences(was, now))]',
        "found = [] if record['base'] == now else ['a field']",
        DECIDE,
    ),
    'wrong labels of which some are right': Bug(
        'eval/claims/measures/rescaling.py',
        'rng.integers(1, TASK.classes, TASK.trained)',
        'rng.integers(0, TASK.classes, TASK.trained)',
        'tests/eval/claims/measures/test_rescaling.py',
    ),
    'wrong labels of which one is right': Bug(
        'eval/claims/lab.py',
        '(task.trained,), 1, task.classes)',
        '(task.trained,), 0, task.classes)',
        'tests/eval/claims/test_lab.py',
    ),
    'a threshold chosen by what it is judged by': Bug(
        'eval/claims/measures/classifiers.py',
        'order = jnp.argsort(-leads_2H[0])',
        'order = jnp.argsort(-leads_2H[1])',
        'tests/eval/claims/measures/test_classifiers.py',
    ),
    'ranks from 1': Bug(
        'eval/claims/measures/classifiers.py',
        'jnp.sum(logits_HV > logit_H1, -1)',
        'jnp.sum(logits_HV >= logit_H1, -1)',
        'tests/eval/claims/measures/test_classifiers.py',
    ),
    'a batch of sizes that are not squared': Bug(
        'eval/claims/measures/classifiers.py',
        'jnp.sum(jnp.square(q_B))',
        'jnp.sum(q_B)',
        'tests/eval/claims/measures/test_classifiers.py',
    ),
    'one weight of each unit': Bug(
        'eval/claims/measures/norms_alone.py',
        'ranks_IO < 2',
        'ranks_IO < 1',
        'tests/eval/claims/measures/test_norms_alone.py',
    ),
    'distances from the last step': Bug(
        'eval/claims/measures/large_batches.py',
        'zip(params, start, strict=True)]',
        'zip(params, params, strict=True)]',
        'tests/eval/claims/measures/test_large_batches.py',
    ),
}
