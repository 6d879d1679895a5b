//! What the queue counts, step by step: waiting calls, workers and late batches.

use tokio::sync::oneshot;

use super::batcher::{Bounds, Queue};
use super::model::{Item, MAX_BATCH_KEYS};

/// Queues a call, for whose reply nobody waits.
fn push(queue: &mut Queue<Item>, number: usize, kind: u8) {
    queue.push(Item { number, kind }, oneshot::channel().0).unwrap();
}

/// Returns the calls of the next batch.
fn take(queue: &mut Queue<Item>) -> Vec<usize> {
    queue.take().into_iter().map(|waiting| waiting.item.number).collect()
}

#[test]
fn a_worker_passes_over_four_batches_of_calls_that_cannot_join() {
    for (skipped, batch) in [(4 * MAX_BATCH_KEYS, vec![0, 9]), (4 * MAX_BATCH_KEYS + 1, vec![0])] {
        let mut queue = Queue::new(Bounds { max_batch_keys: MAX_BATCH_KEYS, ..Bounds::new() });
        push(&mut queue, 0, 0);
        (0..skipped).for_each(|_| push(&mut queue, 5, 1));
        push(&mut queue, 9, 0);
        assert_eq!(take(&mut queue), batch, "{skipped}");
        // The calls that were passed over keep their place.
        assert_eq!(take(&mut queue)[0], 5);
    }
}

#[test]
fn a_second_worker_is_worth_a_full_batch_and_a_late_batch_one_more_worker() {
    let mut queue = Queue::new(Bounds { workers: 2, max_batch_keys: 2, ..Bounds::new() });
    push(&mut queue, 1, 1);
    assert!(queue.opens_worker(), "the first worker needs no number of keys");
    push(&mut queue, 2, 1);
    assert!(!queue.opens_worker(), "the first worker takes them");
    assert_eq!(take(&mut queue), [1, 2]);
    push(&mut queue, 1, 1);
    assert!(!queue.opens_worker());
    push(&mut queue, 2, 1);
    assert!(queue.opens_worker());
    assert_eq!(take(&mut queue), [1, 2]);
    [1, 2].into_iter().for_each(|key| push(&mut queue, key, 1));
    assert!(!queue.opens_worker(), "two workers at most");
    [4, 5].into_iter().for_each(|ticket| queue.abandon(ticket));
    // While a batch is late, a call that waits opens one more worker.
    queue.late += 1;
    assert!(!queue.opens_worker(), "nothing waits");
    push(&mut queue, 3, 1);
    assert!(queue.opens_worker());
    assert!(!queue.opens_worker());
    assert!(!queue.has_surplus());
    queue.finish_batch(true);
    // The worker that was started beside the late batch ends, and leaves the call to the others.
    assert!(queue.has_surplus());
    assert_eq!(queue.close_worker().len(), 0);
    assert!(!queue.has_surplus());
    assert_eq!(take(&mut queue), [3]);
}
