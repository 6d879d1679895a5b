//! What the queue counts, step by step: waiting keys, lanes and late batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::oneshot;

use super::queue::{BatchItem, Queue, QueueReply};
use super::{Item, MAX_BATCH_KEYS};

type Reply = oneshot::Receiver<QueueReply<Item>>;

/// Queues an exclusive call with these keys.
fn push(queue: &mut Queue<Item>, keys: &[u64]) -> Reply {
    let (reply, receiver) = oneshot::channel();
    let item = Item { number: 0, kind: 1, keys: keys.to_vec() };
    queue.push(item, reply);
    receiver
}

/// Returns the keys of the next batch.
fn take(queue: &mut Queue<Item>) -> Vec<u64> {
    let batch = queue.take(MAX_BATCH_KEYS);
    batch.into_iter().flat_map(|waiting| waiting.item.keys).collect()
}

#[test]
fn calls_have_room_up_to_the_bound() {
    let mut queue = Queue::default();
    assert!(queue.has_room(9, 5), "one call may be larger than the bound");
    let _first = push(&mut queue, &[1, 2]);
    let _second = push(&mut queue, &[3]);
    assert_eq!(queue.keys, 3);
    for (more, has_room) in [(1, true), (2, true), (3, false)] {
        assert_eq!(queue.has_room(more, 5), has_room, "{more}");
    }
    assert_eq!(queue.keys, 3, "no call was abandoned");
}

#[test]
fn abandoned_call_gives_its_room_back_unless_it_was_sent() {
    let mut queue = Queue::default();
    // Their tickets count from 0.
    let _replies = [&[1, 2][..], &[4], &[3, 6], &[5], &[7]].map(|keys| push(&mut queue, keys));
    assert!(!queue.has_room(1, 7));
    queue.abandon(0);
    assert_eq!(queue.keys, 5);
    assert!(queue.has_room(2, 7) && !queue.has_room(3, 7));
    for ticket in [0, 9] {
        queue.abandon(ticket);
        assert_eq!(queue.keys, 5, "no call {ticket} waits");
    }
    queue.abandon(2);
    assert_eq!(queue.keys, 3, "a call between others");
    assert_eq!((take(&mut queue), queue.keys), (vec![4, 5, 7], 0));
    let _reply = push(&mut queue, &[8]);
    queue.abandon(3);
    assert_eq!(queue.keys, 1, "the call was sent");
    assert_eq!((take(&mut queue), queue.keys), (vec![8], 0));
}

/// A call that counts how often the queue looks at it.
struct Looked(Arc<AtomicUsize>);

impl BatchItem for Looked {
    type Reply = ();

    fn can_join(&self, _: &Self) -> bool {
        true
    }

    fn key_hashes(&self) -> &[u64] {
        self.0.fetch_add(1, Ordering::Relaxed);
        &[1]
    }

    fn is_bounded(&self) -> bool {
        true
    }

    fn allows_shared_keys(&self) -> bool {
        true
    }
}

#[test]
fn refused_call_looks_at_no_call_that_waits() {
    const CALLS: usize = 10_000;
    let (mut queue, looks) = (Queue::default(), Arc::new(AtomicUsize::new(0)));
    let _replies: Vec<_> = (0..CALLS)
        .map(|_| {
            let (reply, receiver) = oneshot::channel();
            queue.push(Looked(Arc::clone(&looks)), reply);
            receiver
        })
        .collect();
    let pushed = looks.load(Ordering::Relaxed);
    for _ in 0..100 {
        assert!(!queue.has_room(1, CALLS));
    }
    assert_eq!(looks.load(Ordering::Relaxed), pushed);
}

#[test]
fn keys_are_counted_until_they_are_sent_and_a_key_stands_once_in_a_batch() {
    let mut queue = Queue::default();
    let _replies = [&[1][..], &[2], &[1]].map(|keys| push(&mut queue, keys));
    assert_eq!((take(&mut queue), queue.keys), (vec![1, 2], 1));
    assert!(queue.has_waiting());
    assert_eq!((take(&mut queue), queue.keys), (vec![1], 0));
    assert!(!queue.has_waiting());
}

#[test]
fn a_batch_is_full_with_its_last_key_and_a_larger_call_goes_alone() {
    let mut queue = Queue::default();
    let calls = [&[1][..], &[2], &[3, 4], &[5], &[6, 7, 8, 9, 10], &[11]];
    let _replies = calls.map(|keys| push(&mut queue, keys));
    for batch in [&[1, 2, 3, 4][..], &[5], &[6, 7, 8, 9, 10], &[11]] {
        assert_eq!(take(&mut queue), batch);
    }
}

#[test]
fn a_lane_passes_over_four_batches_of_keys_that_are_in_its_batch() {
    for (skipped, batch) in [(4 * MAX_BATCH_KEYS, vec![1, 2]), (4 * MAX_BATCH_KEYS + 1, vec![1])] {
        let mut queue = Queue::default();
        let keys = std::iter::repeat_n(1, skipped + 1).chain([2]);
        let _replies: Vec<_> = keys.map(|key| push(&mut queue, &[key])).collect();
        assert_eq!(take(&mut queue), batch, "{skipped}");
        // The calls that were passed over keep their place.
        assert_eq!(take(&mut queue)[0], 1);
    }
}

#[test]
fn only_the_last_lane_gives_the_waiting_calls_back() {
    let mut queue = Queue::default();
    let _replies = [&[7, 8, 9][..], &[1, 2]].map(|keys| push(&mut queue, keys));
    for runtime in [0, 0, 1] {
        assert!(queue.opens_lane(runtime, 2, 1));
    }
    for runtime in [0, 0] {
        assert_eq!((queue.close_lane(runtime).len(), queue.keys), (0, 5));
    }
    assert!(queue.opens_lane(0, 2, 1), "two lanes have ended");
    assert_eq!((queue.close_lane(1).len(), queue.keys), (0, 5));
    assert!(queue.has_lanes());
    assert_eq!((queue.close_lane(0).len(), queue.keys), (2, 0));
    assert!(!queue.has_lanes() && !queue.has_waiting());
    assert_eq!(queue.close_lane(0).len(), 0, "no lane is left");
}

#[test]
fn a_second_lane_is_worth_some_keys_and_a_late_batch_one_more_lane() {
    let mut queue = Queue::default();
    let _first = push(&mut queue, &[1, 2]);
    assert!(queue.opens_lane(0, 2, 3), "the first lane needs no number of keys");
    assert!(!queue.opens_lane(0, 2, 3));
    assert!(queue.opens_lane(0, 2, 2));
    assert!(!queue.opens_lane(0, 2, 1), "two lanes at most");
    assert_eq!(take(&mut queue), [1, 2]);
    // While a batch is late, a call that waits opens one more lane.
    queue.add_late();
    assert!(!queue.opens_lane(0, 2, 0), "nothing waits");
    let _second = push(&mut queue, &[3]);
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
    let _reply = push(&mut queue, &[1]);
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
    let _reply = push(&mut queue, &[1]);
    for runtime in [0, 1, 2] {
        assert!(queue.opens_lane(runtime, 1, 9), "{runtime}");
        assert!(!queue.opens_lane(runtime, 1, 1), "{runtime}");
        assert!(!queue.has_surplus(runtime, 1), "the only lane of {runtime}");
    }
    assert_eq!((queue.close_lane(1).len(), take(&mut queue)), (0, vec![1]));
    assert!(!queue.opens_lane(1, 1, 9), "nothing waits");
}
