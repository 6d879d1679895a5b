//! What the queue counts, step by step: waiting calls, lanes and late batches.

use tokio::sync::oneshot;

use super::queue::{Queue, QueueReply};
use super::{Item, MAX_BATCH_KEYS};

type Reply = oneshot::Receiver<QueueReply<Item>>;

/// Queues a call with this number.
fn push(queue: &mut Queue<Item>, number: usize) -> Reply {
    push_of_kind(queue, number, 1)
}

fn push_of_kind(queue: &mut Queue<Item>, number: usize, kind: u8) -> Reply {
    let (reply, receiver) = oneshot::channel();
    queue.push(Item { number, kind }, reply);
    receiver
}

/// Returns the calls of the next batch.
fn take(queue: &mut Queue<Item>) -> Vec<usize> {
    queue.take(MAX_BATCH_KEYS).into_iter().map(|waiting| waiting.item.number).collect()
}

#[test]
fn a_lane_passes_over_four_batches_of_calls_that_cannot_join() {
    for (skipped, batch) in [(4 * MAX_BATCH_KEYS, vec![0, 9]), (4 * MAX_BATCH_KEYS + 1, vec![0])] {
        let mut queue = Queue::default();
        let _first = push_of_kind(&mut queue, 0, 0);
        let _others: Vec<_> = (1..=skipped).map(|_| push_of_kind(&mut queue, 5, 1)).collect();
        let _last = push_of_kind(&mut queue, 9, 0);
        assert_eq!(take(&mut queue), batch, "{skipped}");
        // The calls that were passed over keep their place.
        assert_eq!(take(&mut queue)[0], 5);
    }
}

#[test]
fn a_second_lane_is_worth_some_keys_and_a_late_batch_one_more_lane() {
    let mut queue = Queue::default();
    let _first = [1, 2].map(|key| push(&mut queue, key));
    assert!(queue.opens_lane(2, 3), "the first lane needs no number of keys");
    assert!(!queue.opens_lane(2, 2), "the first lane takes them");
    assert_eq!(take(&mut queue), [1, 2]);
    let _more = [1, 2].map(|key| push(&mut queue, key));
    assert!(!queue.opens_lane(2, 3));
    assert!(queue.opens_lane(2, 2));
    assert_eq!(take(&mut queue), [1, 2]);
    let _last = push(&mut queue, 1);
    assert!(!queue.opens_lane(2, 1), "two lanes at most");
    queue.abandon(4);
    // While a batch is late, a call that waits opens one more lane.
    queue.add_late();
    assert!(!queue.opens_lane(2, 0), "nothing waits");
    let _second = push(&mut queue, 3);
    assert!(queue.opens_lane(2, 9));
    assert!(!queue.opens_lane(2, 9));
    assert!(!queue.has_surplus(2));
    queue.finish_batch(true);
    // The lane that was started beside the late batch ends, and leaves the call to the others.
    assert!(queue.has_surplus(2));
    assert_eq!(queue.close_lane().len(), 0);
    assert!(!queue.has_surplus(2));
    assert_eq!(take(&mut queue), [3]);
}
