//! Which ready part goes next: a priority queue with a byte credit.
//!
//! A larger priority goes sooner; equal priorities go in the order of their arrival. The credit
//! bounds the bytes that have been handed to the transport and are not yet on their way, so that an
//! urgent part never waits behind more than that. A part larger than the credit goes alone.

#![forbid(unsafe_code)]

use std::cmp::Ordering;
use std::collections::BinaryHeap;

struct Ready<T> {
    priority: i64,
    sequence: u64,
    bytes: usize,
    item: T,
}

impl<T> Ready<T> {
    fn order(&self) -> (i64, std::cmp::Reverse<u64>) {
        (self.priority, std::cmp::Reverse(self.sequence))
    }
}

impl<T> PartialEq for Ready<T> {
    fn eq(&self, other: &Self) -> bool {
        self.sequence == other.sequence
    }
}

impl<T> Eq for Ready<T> {}

impl<T> PartialOrd for Ready<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for Ready<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.order().cmp(&other.order())
    }
}

/// Ready items and the credit that they draw on. Units are bytes.
pub struct CreditQueue<T> {
    heap: BinaryHeap<Ready<T>>,
    sequence: u64,
    credit_bytes: usize,
    in_flight_bytes: usize,
}

impl<T> CreditQueue<T> {
    /// An empty queue that lets `credit_bytes` be in flight.
    #[must_use]
    pub fn new(credit_bytes: usize) -> CreditQueue<T> {
        CreditQueue { heap: BinaryHeap::new(), sequence: 0, credit_bytes, in_flight_bytes: 0 }
    }

    /// Lets so many bytes be in flight from now on; those that are stay in flight.
    pub fn set_credit(&mut self, credit_bytes: usize) {
        self.credit_bytes = credit_bytes;
    }

    /// Makes room for `items` more, so that pushing them allocates nothing.
    pub fn reserve(&mut self, items: usize) {
        self.heap.reserve(items);
    }

    /// An item is ready to go.
    pub fn push(&mut self, priority: i64, bytes: usize, item: T) {
        let sequence = self.sequence;
        self.sequence += 1;
        self.heap.push(Ready { priority, sequence, bytes, item });
    }

    /// The item that goes next, if the credit allows it.
    #[must_use]
    pub fn peek(&self) -> Option<&T> {
        let next = self.heap.peek()?;
        let fits = self.in_flight_bytes + next.bytes <= self.credit_bytes;
        (fits || self.in_flight_bytes == 0).then_some(&next.item)
    }

    /// Takes the item that [`peek`](Self::peek) showed: its bytes are in flight now.
    pub fn take(&mut self) -> Option<T> {
        self.peek()?;
        let next = self.heap.pop()?;
        self.in_flight_bytes += next.bytes;
        Some(next.item)
    }

    /// Bytes that were in flight are on their way.
    pub fn returned(&mut self, bytes: usize) {
        assert!(bytes <= self.in_flight_bytes, "more credit returned than taken");
        self.in_flight_bytes -= bytes;
    }

    /// Drops the waiting items that `unwanted` picks.
    pub fn remove(&mut self, mut unwanted: impl FnMut(&T) -> bool) {
        self.heap.retain(|ready| !unwanted(&ready.item));
    }

    /// Bytes that were [taken](Self::take) and have not [returned](Self::returned).
    #[must_use]
    pub fn in_flight_bytes(&self) -> usize {
        self.in_flight_bytes
    }

    /// The items that wait, in no order.
    pub fn waiting(&self) -> impl Iterator<Item = &T> {
        self.heap.iter().map(|ready| &ready.item)
    }

    /// Items that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::CreditQueue;

    #[test]
    fn larger_priority_first_then_arrival() {
        let mut queue = CreditQueue::new(100);
        for (priority, item) in [(0, 'c'), (-3, 'e'), (7, 'a'), (0, 'd'), (7, 'b')] {
            queue.push(priority, 10, item);
        }
        let order: String = std::iter::from_fn(|| queue.take()).collect();
        assert_eq!(order, "abcde");
    }

    #[test]
    fn credit_bounds_what_is_in_flight() {
        let mut queue = CreditQueue::new(100);
        queue.push(0, 60, 'a');
        queue.push(0, 60, 'b');
        queue.push(0, 500, 'c');
        assert_eq!(queue.take(), Some('a'));
        assert_eq!(queue.take(), None, "60 + 60 is over the credit");
        queue.push(9, 40, 'u');
        assert_eq!(queue.take(), Some('u'), "an urgent item overtakes those that wait");
        queue.returned(60);
        assert_eq!(queue.take(), Some('b'));
        queue.returned(40);
        assert_eq!(queue.take(), None);
        queue.returned(60);
        assert_eq!(queue.take(), Some('c'), "larger than the credit, so it goes alone");
    }

    #[test]
    fn a_credit_may_change_at_any_time() {
        let mut queue = CreditQueue::new(10);
        for item in ['a', 'b', 'c'] {
            queue.push(0, 10, item);
        }
        assert_eq!((queue.take(), queue.take()), (Some('a'), None));
        queue.set_credit(20);
        assert_eq!((queue.take(), queue.take()), (Some('b'), None));
        // More is in flight than may be now: it comes back all the same.
        queue.set_credit(5);
        queue.returned(10);
        assert_eq!(queue.take(), None);
        queue.returned(10);
        assert_eq!(queue.take(), Some('c'), "larger than the credit, so it goes alone");
    }

    #[test]
    fn removed_items_do_not_come_back() {
        let mut queue = CreditQueue::new(100);
        for item in 0..10 {
            queue.push(0, 1, item);
        }
        queue.remove(|item| item % 2 == 0);
        assert_eq!(std::iter::from_fn(|| queue.take()).collect::<Vec<_>>(), [1, 3, 5, 7, 9]);
    }
}
