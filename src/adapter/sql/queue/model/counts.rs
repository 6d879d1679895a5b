//! What the queue counts, step by step: waiting calls, lanes and late batches.

use tokio::sync::oneshot;

use super::queue::{Queue, QueueReply};
use super::{Item, MAX_BATCH_KEYS};

type Reply = oneshot::Receiver<QueueReply<Item>>;

/// Queues an exclusive call with this key.
fn push(queue: &mut Queue<Item>, key: u64) -> Reply {
    let (reply, receiver) = oneshot::channel();
    let item = Item { number: 0, kind: 1, key };
    queue.push(item, reply);
    receiver
}

/// Returns the keys of the next batch.
fn take(queue: &mut Queue<Item>) -> Vec<u64> {
    queue.take(MAX_BATCH_KEYS).into_iter().map(|waiting| waiting.item.key).collect()
}

#[test]
fn abandoned_call_gives_its_room_back_unless_it_was_sent() {
    let mut queue = Queue::default();
    // Their tickets count from 0.
    let _replies = [1, 4, 3, 5, 7].map(|key| push(&mut queue, key));
    assert_eq!(queue.len(), 5);
    queue.abandon(0);
    assert_eq!(queue.len(), 4);
    for ticket in [0, 9] {
        queue.abandon(ticket);
        assert_eq!(queue.len(), 4, "no call {ticket} waits");
    }
    queue.abandon(2);
    assert_eq!(queue.len(), 3, "a call between others");
    assert_eq!((take(&mut queue), queue.len()), (vec![4, 5, 7], 0));
    let _reply = push(&mut queue, 8);
    queue.abandon(3);
    assert_eq!(queue.len(), 1, "the call was sent");
    assert_eq!((take(&mut queue), queue.len()), (vec![8], 0));
}

#[test]
fn key_stands_once_in_a_batch() {
    let mut queue = Queue::default();
    let _replies = [1, 2, 1].map(|key| push(&mut queue, key));
    assert_eq!((take(&mut queue), queue.len()), (vec![1, 2], 1));
    assert_eq!((take(&mut queue), queue.len()), (vec![1], 0));
}

#[test]
fn batch_is_full_with_its_last_key() {
    let mut queue = Queue::default();
    let keys: Vec<u64> = (0..2 * MAX_BATCH_KEYS as u64 + 1).collect();
    let _replies: Vec<_> = keys.iter().map(|key| push(&mut queue, *key)).collect();
    for batch in keys.chunks(MAX_BATCH_KEYS) {
        assert_eq!(take(&mut queue), batch);
    }
}

#[test]
fn a_lane_passes_over_four_batches_of_keys_that_are_in_its_batch() {
    for (skipped, batch) in [(4 * MAX_BATCH_KEYS, vec![1, 2]), (4 * MAX_BATCH_KEYS + 1, vec![1])] {
        let mut queue = Queue::default();
        let keys = std::iter::repeat_n(1, skipped + 1).chain([2]);
        let _replies: Vec<_> = keys.map(|key| push(&mut queue, key)).collect();
        assert_eq!(take(&mut queue), batch, "{skipped}");
        // The calls that were passed over keep their place.
        assert_eq!(take(&mut queue)[0], 1);
    }
}

#[test]
fn only_the_last_lane_gives_the_waiting_calls_back() {
    let mut queue = Queue::default();
    let _replies = [7, 1].map(|key| push(&mut queue, key));
    for runtime in [0, 0, 1] {
        assert!(queue.opens_lane(runtime, 2, 1));
    }
    for runtime in [0, 0] {
        assert_eq!((queue.close_lane(runtime).len(), queue.len()), (0, 2));
    }
    assert!(queue.opens_lane(0, 2, 1), "two lanes have ended");
    assert_eq!((queue.close_lane(1).len(), queue.len()), (0, 2));
    assert!(queue.has_lanes());
    assert_eq!((queue.close_lane(0).len(), queue.len()), (2, 0));
    assert!(!queue.has_lanes());
    assert_eq!(queue.close_lane(0).len(), 0, "no lane is left");
}

#[test]
fn a_second_lane_is_worth_some_keys_and_a_late_batch_one_more_lane() {
    let mut queue = Queue::default();
    let _first = [1, 2].map(|key| push(&mut queue, key));
    assert!(queue.opens_lane(0, 2, 3), "the first lane needs no number of keys");
    assert!(!queue.opens_lane(0, 2, 3));
    assert!(queue.opens_lane(0, 2, 2));
    assert!(!queue.opens_lane(0, 2, 1), "two lanes at most");
    assert_eq!(take(&mut queue), [1, 2]);
    // While a batch is late, a call that waits opens one more lane.
    queue.add_late();
    assert!(!queue.opens_lane(0, 2, 0), "nothing waits");
    let _second = push(&mut queue, 3);
    assert!(queue.opens_lane(0, 2, 9));
    assert!(!queue.opens_lane(0, 2, 9));
    assert!(!queue.has_surplus(0, 2));
    queue.finish_batch(true);
    // The lane that was started beside the late batch ends, and leaves the call to the others.
    assert!(queue.has_surplus(0, 2));
    assert_eq!(queue.close_lane(0).len(), 0);
    assert!(!queue.has_surplus(0, 2));
    assert_eq!(take(&mut queue), [3]);
}

#[test]
fn as_many_late_batches_as_lanes_open_a_lane_each() {
    let mut queue = Queue::default();
    let _reply = push(&mut queue, 1);
    for _ in 0..3 {
        queue.add_late();
    }
    let opened = (0..9).filter(|_| queue.opens_lane(0, 2, 1)).count();
    assert_eq!(opened, 4);
}

/// The runtime of the other lanes may not be driven.
#[test]
fn every_runtime_has_a_lane_while_it_has_calls() {
    let mut queue = Queue::default();
    let _reply = push(&mut queue, 1);
    for runtime in [0, 1, 2] {
        assert!(queue.opens_lane(runtime, 1, 9), "{runtime}");
        assert!(!queue.opens_lane(runtime, 1, 1), "{runtime}");
        assert!(!queue.has_surplus(runtime, 1), "the only lane of {runtime}");
    }
    assert_eq!((queue.close_lane(1).len(), take(&mut queue)), (0, vec![1]));
    assert!(!queue.opens_lane(1, 1, 9), "nothing waits");
}
