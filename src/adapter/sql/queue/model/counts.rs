//! What the queue counts, step by step: waiting keys, lanes and late batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::oneshot;

use super::queue::{BatchItem, QueueReply, Queues};
use super::{Item, MAX_BATCH_KEYS};

type Reply = oneshot::Receiver<QueueReply<Item>>;

/// Queues an exclusive call with these keys in a runtime.
fn push(queues: &mut Queues<Item>, runtime: u8, keys: &[u64]) -> Reply {
    let (reply, receiver) = oneshot::channel();
    let item = Item { number: 0, kind: 1, keys: keys.to_vec() };
    queues.push(runtime, item, reply);
    receiver
}

fn opens_lane(queues: &mut Queues<Item>, runtime: u8, lanes: usize, min_keys: usize) -> bool {
    queues.by_runtime.get_mut(&runtime).unwrap().opens_lane(lanes, min_keys)
}

/// Returns the keys of the next batch.
fn take(queues: &mut Queues<Item>, runtime: u8, lanes: usize) -> Vec<u64> {
    let batch = queues.take(runtime, lanes, MAX_BATCH_KEYS);
    batch.into_iter().flat_map(|waiting| waiting.item.keys).collect()
}

#[test]
fn calls_have_room_up_to_the_bound_over_all_runtimes() {
    let mut queues = Queues::default();
    assert!(queues.has_room(9, 5), "one call may be larger than the bound");
    let _first = push(&mut queues, 0, &[1, 2]);
    let _second = push(&mut queues, 1, &[3]);
    assert_eq!(queues.keys, 3);
    for (more, has_room) in [(1, true), (2, true), (3, false)] {
        assert_eq!(queues.has_room(more, 5), has_room, "{more}");
    }
    assert_eq!(queues.keys, 3, "no call was abandoned");
}

#[test]
fn abandoned_call_gives_its_room_back_unless_it_was_sent() {
    let mut queues = Queues::default();
    // Their tickets count from 0.
    let calls = [(0, &[1, 2][..]), (1, &[4]), (0, &[3]), (1, &[5])];
    let _replies = calls.map(|(runtime, keys)| push(&mut queues, runtime, keys));
    assert!(!queues.has_room(1, 5));
    queues.abandon(0, 0);
    assert_eq!(queues.keys, 3);
    assert!(queues.has_room(2, 5) && !queues.has_room(3, 5));
    for (runtime, ticket) in [(0, 0), (0, 1), (0, 9), (2, 0)] {
        queues.abandon(runtime, ticket);
        assert_eq!(queues.keys, 3, "{runtime} has no call {ticket}");
    }
    assert!(opens_lane(&mut queues, 1, 1, 1));
    assert_eq!((take(&mut queues, 1, 1), queues.keys), (vec![4, 5], 1));
    queues.abandon(1, 3);
    assert_eq!(queues.keys, 1, "the call was sent");
    assert!(opens_lane(&mut queues, 0, 1, 1));
    assert_eq!((take(&mut queues, 0, 1), queues.keys), (vec![3], 0));
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
    let (mut queues, looks) = (Queues::default(), Arc::new(AtomicUsize::new(0)));
    let _replies: Vec<_> = (0..CALLS)
        .map(|_| {
            let (reply, receiver) = oneshot::channel();
            queues.push(0, Looked(Arc::clone(&looks)), reply);
            receiver
        })
        .collect();
    let pushed = looks.load(Ordering::Relaxed);
    for _ in 0..100 {
        assert!(!queues.has_room(1, CALLS));
    }
    assert_eq!(looks.load(Ordering::Relaxed), pushed);
}

#[test]
fn keys_are_counted_until_they_are_sent_and_a_key_stands_once_in_a_batch() {
    let mut queues = Queues::default();
    let _replies = [&[1][..], &[2], &[1]].map(|keys| push(&mut queues, 0, keys));
    assert!(opens_lane(&mut queues, 0, 2, 1));
    assert_eq!((take(&mut queues, 0, 2), queues.keys), (vec![1, 2], 1));
    assert!(queues.has_waiting(0));
    assert!(!queues.has_waiting(1));
    assert_eq!((take(&mut queues, 0, 2), queues.keys), (vec![1], 0));
    assert!(!queues.has_waiting(0));
}

#[test]
fn a_batch_is_full_with_its_last_key_and_a_larger_call_goes_alone() {
    let mut queues = Queues::default();
    let calls = [&[1][..], &[2], &[3, 4], &[5], &[6, 7, 8, 9, 10], &[11]];
    let _replies = calls.map(|keys| push(&mut queues, 0, keys));
    assert!(opens_lane(&mut queues, 0, 1, 1));
    for batch in [&[1, 2, 3, 4][..], &[5], &[6, 7, 8, 9, 10], &[11]] {
        assert_eq!(take(&mut queues, 0, 1), batch);
    }
}

#[test]
fn a_lane_passes_over_four_batches_of_keys_that_are_in_its_batch() {
    for (skipped, batch) in [(4 * MAX_BATCH_KEYS, vec![1, 2]), (4 * MAX_BATCH_KEYS + 1, vec![1])] {
        let mut queues = Queues::default();
        let keys = std::iter::repeat_n(1, skipped + 1).chain([2]);
        let _replies: Vec<_> = keys.map(|key| push(&mut queues, 0, &[key])).collect();
        assert!(opens_lane(&mut queues, 0, 1, 1));
        assert_eq!(take(&mut queues, 0, 1), batch, "{skipped}");
        // The calls that were passed over keep their place.
        assert_eq!(take(&mut queues, 0, 1)[0], 1);
    }
}

#[test]
fn only_the_last_lane_gives_the_waiting_calls_back() {
    let mut queues = Queues::default();
    let _other = push(&mut queues, 1, &[7, 8, 9]);
    let _reply = push(&mut queues, 0, &[1, 2]);
    for _ in 0..2 {
        assert!(opens_lane(&mut queues, 0, 2, 1));
    }
    assert_eq!((queues.close_lane(0).len(), queues.keys), (0, 5));
    assert!(opens_lane(&mut queues, 0, 2, 1), "one lane has ended");
    assert_eq!((queues.close_lane(0).len(), queues.keys), (0, 5));
    assert_eq!((queues.close_lane(0).len(), queues.keys), (1, 3));
    assert!(!queues.by_runtime.contains_key(&0));
    assert_eq!(queues.close_lane(0).len(), 0, "the runtime has no queue any more");
}

#[test]
fn a_second_lane_is_worth_some_keys_and_a_late_batch_one_more_lane() {
    let mut queues = Queues::default();
    let _first = push(&mut queues, 0, &[1, 2]);
    assert!(opens_lane(&mut queues, 0, 2, 3), "the first lane needs no number of keys");
    assert!(!opens_lane(&mut queues, 0, 2, 3));
    assert!(opens_lane(&mut queues, 0, 2, 2));
    assert!(!opens_lane(&mut queues, 0, 2, 1), "two lanes at most");
    assert_eq!(take(&mut queues, 0, 2), [1, 2]);
    // While a batch is late, a call that waits opens one more lane.
    queues.by_runtime.get_mut(&0).unwrap().add_late();
    assert!(!opens_lane(&mut queues, 0, 2, 0), "nothing waits");
    let _second = push(&mut queues, 0, &[3]);
    assert!(opens_lane(&mut queues, 0, 2, 9));
    assert!(!opens_lane(&mut queues, 0, 2, 9));
    queues.finish_batch(0, true);
    // The lane that was started beside the late batch ends, and leaves the call to the others.
    assert!(take(&mut queues, 0, 2).is_empty());
    assert_eq!((queues.close_lane(0).len(), take(&mut queues, 0, 2)), (0, vec![3]));
}

#[test]
fn as_many_late_batches_as_lanes_open_a_lane_each() {
    let mut queues = Queues::default();
    let _reply = push(&mut queues, 0, &[1]);
    for _ in 0..3 {
        queues.by_runtime.get_mut(&0).unwrap().add_late();
    }
    let opened = (0..9).filter(|_| opens_lane(&mut queues, 0, 2, 1)).count();
    assert_eq!(opened, 4);
}
