//! Answers that a device writes straight to where the other end granted memory.

use super::*;

/// A push_pull from and into registered memory, as of tensors on GPUs: a contribution, and its
/// publication from an accumulator.
#[test]
fn calls_of_a_push_pull_in_registered_memory_are_as_many_as_the_design_says() {
    if !has_device() {
        return;
    }
    for (bytes, extents) in [(2000usize, 1u64), (64 << 10, 1), (1 << 20, 16)] {
        let (mut worker, mut server) = pair(bytes, [None, None]);
        let sent: Vec<u8> = (0..bytes).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let landing = NonNull::new(worker.memory.as_mut_ptr()).unwrap();
        let accumulator = NonNull::new(server.memory.as_mut_ptr()).unwrap();
        // SAFETY: the memory outlives the drivers, which are dropped below.
        unsafe {
            worker.driver.register(NonNull::from(&sent[0]), bytes).unwrap();
            worker.driver.register_landing(landing, bytes).unwrap();
            server.driver.register(accumulator, bytes).unwrap();
        }
        let rounds = 40;
        for round in 1..=rounds {
            worker.memory.fill(0);
            worker.ask(&sent, bytes);
            until(&mut [&mut worker, &mut server], "a push", |ends| ends[1].landed == round);
            let grant = server.grant.take().expect("the server is told");
            let result = server.memory.clone();
            server.memory.iter_mut().for_each(|byte| *byte ^= 0xff);
            let memory = std::mem::take(&mut server.memory);
            server.answer(&memory, grant);
            server.memory = memory;
            until(&mut [&mut worker, &mut server], "a pull", |ends| ends[0].answered == round);
            assert!(result == sent, "round {round}: the contribution");
            assert!(worker.memory == server.memory, "round {round}: the publication");
        }
        let rounds = rounds as u64;
        let (pushes, pulls) = (worker.rails.counters(), server.rails.counters());
        let of_pushes = (count(&pushes.extents), count(&pushes.staged_bytes));
        assert_eq!(of_pushes, (rounds * extents, 0), "a contribution is writes from its place");
        let of_pulls = (count(&pulls.answers), count(&pulls.extents), count(&pulls.staged_bytes));
        assert_eq!(of_pulls, (rounds, 0, 0), "a publication is one write, from its place");
        assert_eq!(count(&pulls.sends), rounds + count(&pulls.credits), "and nothing else");
        assert!(count(&pulls.send_calls) <= rounds + count(&pulls.credits));
        assert_eq!(count(&pushes.receive_completions), count(&pulls.sends));
        // One completion for each frame of which the sender must know when its memory is free.
        assert!(count(&pulls.signals) <= rounds + count(&pulls.credits) / 16 + 1);
        assert_eq!(count(&pushes.copied_bytes), 0, "a publication is where the device wrote it");
        eprintln!(
            "{bytes} bytes, {rounds} push_pulls: {} and {} writes, {} and {} doorbells, {} and {} \
             signalled, {} credits, {} bytes copied at the worker",
            count(&pushes.sends),
            count(&pulls.sends),
            count(&pushes.send_calls),
            count(&pulls.send_calls),
            count(&pushes.signals),
            count(&pulls.signals),
            count(&pulls.credits),
            count(&pushes.staged_bytes) + count(&pushes.copied_bytes),
        );
        drop((worker.driver, server.driver));
    }
}

#[test]
fn a_grant_that_is_not_of_this_lane_ends_it_and_no_other() {
    if !has_device() {
        return;
    }
    let bytes = 10_000;
    let (mut worker, mut server) = pair(bytes, [None, None]);
    let (mut other_worker, mut other_server) = pair(bytes, [None, None]);
    let result = vec![0x5au8; bytes];
    let at = NonNull::new(worker.memory.as_mut_ptr()).unwrap();
    // SAFETY: the memory outlives the drivers, which are dropped below.
    unsafe {
        worker.driver.register_landing(at, bytes).unwrap();
        server.driver.register(NonNull::from(&result[0]), bytes).unwrap();
        other_server.driver.register(NonNull::from(&result[0]), bytes).unwrap();
    }
    worker.ask(&[1; 10_000], bytes);
    until(&mut [&mut worker, &mut server], "a push", |ends| ends[1].landed == 1);
    let grant = server.grant.take().unwrap();
    // The key and the address of another process's memory, as far as the device knows.
    other_server.answer(&result, grant);
    let mut others = [&mut other_worker, &mut other_server];
    until(&mut others, "the end of the lane", |ends| ends[1].closed.is_some());
    let cause = other_server.closed.unwrap();
    eprintln!("{cause}");
    assert_eq!(cause, Cause::Rdma { status: 10 });
    assert!(cause.to_string().contains("does not allow access to its memory"), "{cause}");
    drop(other_server.driver);
    until(&mut [&mut other_worker], "its other end", |ends| ends[0].closed.is_some());
    assert_eq!((other_worker.landed, other_worker.answered), (0, 0));
    assert!(worker.memory.iter().all(|byte| *byte == 0), "nothing was written");
    // The lane that granted it goes on.
    server.answer(&result, grant);
    until(&mut [&mut worker, &mut server], "a pull", |ends| ends[0].answered == 1);
    assert!(worker.memory == result);
    drop((worker.driver, server.driver));
}
