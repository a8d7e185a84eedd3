//! Tests of `mem/arena.rs`.

use super::*;
use proptest::prelude::*;

fn arena(bytes_max: usize, shared: bool) -> Arena {
    let options = Options { name: "test".to_owned(), numa_node: Some(0), shared };
    Arena::reserve(bytes_max, &options).unwrap()
}

/// The claim's bytes; no other process maps the arenas of these tests while this is used.
fn bytes(claim: &mut Claim) -> &mut [u8] {
    // SAFETY: the claim is the only owner of its range, mapped as long as it is borrowed.
    unsafe { std::slice::from_raw_parts_mut(claim.as_ptr(), claim.len()) }
}

/// Page faults of this thread so far.
fn faults() -> i64 {
    // SAFETY: the structure is plain numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live structure of the type that the call fills.
    let result = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(result, 0);
    usage.ru_minflt + usage.ru_majflt
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn claims_are_aligned_zeroed_and_apart(
        shared in any::<bool>(),
        epochs in proptest::collection::vec(
            proptest::collection::vec(prop_oneof![0usize..300, 0usize..200_000], 0..24), 1..4),
    ) {
        let mut arena = arena(6 << 20, shared);
        for sizes in epochs {
            let mut claims: Vec<Claim> = Vec::new();
            for size in sizes {
                let mut claim = arena.claim(size).unwrap();
                prop_assert_eq!(claim.as_ptr().addr() % ALIGNMENT, 0);
                prop_assert_eq!(claim.len(), size);
                prop_assert!(bytes(&mut claim).iter().all(|&byte| byte == 0));
                prop_assert!(arena.contains(claim.as_ptr(), size));
                claims.push(claim);
            }
            // Each claim gets its own pattern; if two overlapped, one would lose its.
            for (i, claim) in claims.iter_mut().enumerate() {
                bytes(claim).fill(u8::try_from(i + 1).unwrap());
            }
            for (i, claim) in claims.iter_mut().enumerate() {
                prop_assert!(bytes(claim).iter().all(|&byte| usize::from(byte) == i + 1));
            }
            drop(claims);
            arena.release_all().unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_given_back_is_claimed_again(
        steps in proptest::collection::vec((any::<bool>(), 0usize..9000, any::<u8>()), 1..200),
    ) {
        let mut arena = arena(6 << 20, false);
        let mut claims: Vec<Claim> = Vec::new();
        let mut highest = 0;
        for (gives_back, size, number) in steps {
            if gives_back && !claims.is_empty() {
                arena.release(claims.swap_remove(usize::from(number) % claims.len()));
            } else {
                let mut claim = arena.claim(size).unwrap();
                prop_assert_eq!(claim.as_ptr().addr() % ALIGNMENT, 0);
                prop_assert!(bytes(&mut claim).iter().all(|&byte| byte == 0));
                prop_assert!(arena.contains(claim.as_ptr(), size));
                bytes(&mut claim).fill(number | 1);
                claims.push(claim);
            }
            // Those that live do not overlap, and count in full.
            claims.sort_by_key(|claim| (claim.as_ptr().addr(), claim.len()));
            // A claim of no bytes overlaps nothing, wherever it is.
            let ranges = claims.iter().filter(|claim| !claim.is_empty());
            let ranges: Vec<_> = ranges.map(|one| (one.as_ptr().addr(), one.len())).collect();
            for pair in ranges.windows(2) {
                prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0);
            }
            let lengths = claims.iter().map(|claim| claim.len().next_multiple_of(ALIGNMENT));
            let live: usize = lengths.sum();
            prop_assert_eq!(arena.claimed_bytes(), live);
            highest = highest.max(arena.used);
        }
        for claim in claims {
            arena.release(claim);
        }
        prop_assert_eq!((arena.claimed_bytes(), arena.used), (0, 0));
        prop_assert!(arena.free.is_empty() && arena.free_by_length.is_empty());
        prop_assert!(highest <= arena.resident_bytes());
        arena.release_all().unwrap();
    }
}

#[test]
fn using_a_claim_never_faults() {
    for shared in [false, true] {
        let mut arena = arena(16 << 20, shared);
        let mut claim = arena.claim(8 << 20).unwrap();
        let before = faults();
        bytes(&mut claim).fill(7);
        // 2048 pages were written. The few allowed are for the test's own stack and code.
        assert!(faults() - before < 8, "{} faults, shared {shared}", faults() - before);
        assert!(arena.resident_bytes() >= arena.claimed_bytes());
    }
}

#[test]
fn a_full_arena_says_so_and_stays_usable() {
    let mut arena = arena(1, false);
    assert_eq!(arena.reserved_bytes(), STEP_BYTES);
    let first = arena.claim(STEP_BYTES - 64).unwrap();
    let error = arena.claim(65).err().unwrap();
    assert!(
        matches!(error, MemoryError::ArenaFull { need: 65, left: 64, reserved: STEP_BYTES, .. }),
        "{error}"
    );
    assert!(arena.claim(usize::MAX).is_err());
    let last = arena.claim(64).unwrap();
    // SAFETY: the address just past the first claim lies in the same mapping.
    assert_eq!(last.as_ptr(), unsafe { first.as_ptr().add(STEP_BYTES - 64) });
    assert!(arena.claim(1).is_err());
}

#[test]
fn addresses_outlive_the_arena_and_return_with_the_last_claim() {
    let mut arena = arena(1 << 20, false);
    let mut claim = arena.claim(4096).unwrap();
    let error = arena.release_all().unwrap_err();
    assert!(matches!(error, MemoryError::InUse { claims: 1, .. }), "{error}");
    drop(arena);
    bytes(&mut claim).fill(1);
    std::thread::spawn(move || assert_eq!(bytes(&mut claim)[4095], 1)).join().unwrap();
}

#[test]
fn release_keeps_pages_and_addresses() {
    let mut arena = arena(4 << 20, true);
    let mut claim = arena.claim(100).unwrap();
    let at = claim.as_ptr();
    bytes(&mut claim).fill(9);
    let resident = arena.resident_bytes();
    drop(claim);
    arena.release_all().unwrap();
    assert_eq!((arena.claimed_bytes(), arena.resident_bytes()), (0, resident));
    assert!(!arena.contains(at, 1));
    let mut again = arena.claim(200).unwrap();
    assert_eq!(again.as_ptr(), at);
    assert!(bytes(&mut again).iter().all(|&byte| byte == 0), "memory is zeroed anew");
}

#[test]
fn contains_and_offsets_know_the_bounds() {
    let mut arena = arena(1 << 20, false);
    let claim = arena.claim(128).unwrap();
    let at: *const u8 = claim.as_ptr();
    assert_eq!(arena.base(), claim.as_ptr());
    assert!(arena.contains(at, 128) && arena.contains(at.wrapping_add(128), 0));
    assert!(!arena.contains(at, 129) && !arena.contains(at.wrapping_sub(1), 1));
    assert!(!arena.contains(at, usize::MAX) && !arena.contains(std::ptr::null(), 1));
    assert_eq!(arena.offset_of(at.wrapping_add(64)), Some(64));
    assert_eq!(arena.offset_of(at.wrapping_add(128)), None);
    assert_eq!(arena.offset_of(at.wrapping_sub(1)), None);
}

#[test]
fn a_peer_sees_shared_memory_but_cannot_shrink_it() {
    let mut arena = arena(2 << 20, true);
    let mut claim = arena.claim(4096).unwrap();
    bytes(&mut claim)[17] = 42;
    let offset = arena.offset_of(claim.as_ptr().wrapping_add(17)).unwrap();
    let memfd = arena.memfd().unwrap();
    let mut byte = [0u8];
    assert_eq!(rustix::io::pread(memfd, &mut byte, offset as u64), Ok(1));
    assert_eq!(byte, [42]);
    assert_eq!(ftruncate(memfd, 0), Err(rustix::io::Errno::PERM));
    assert_eq!(ftruncate(memfd, 1 << 30), Err(rustix::io::Errno::PERM));
    assert!(super::super::Arena::reserve(1, &Options::default()).unwrap().memfd().is_none());
}

#[test]
fn impossible_sizes_are_errors_with_a_remedy() {
    for bytes in [usize::MAX, usize::MAX / 2, 1 << 60] {
        let error = Arena::reserve(bytes, &Options::default()).err().unwrap();
        assert!(error.to_string().contains("ulimit -v"), "{error}");
    }
    // Reserving is free, so an arena may be larger than the machine; claiming is where it is said.
    let machine = Headroom::read(Path::new("/")).ram.unwrap().1;
    let mut arena = arena(usize::try_from(machine).unwrap() * 2, false);
    let error = arena.claim(usize::try_from(machine).unwrap() + 1).err().unwrap();
    assert!(matches!(error, MemoryError::Ram { .. } | MemoryError::ControlGroup { .. }), "{error}");
    assert_eq!(arena.claimed_bytes(), 0);
    assert!(arena.claim(4096).is_ok());
}

#[test]
fn what_is_prepared_is_claimed_without_further_pages() {
    let mut arena = arena(64 << 20, true);
    arena.prepare(40 << 20).unwrap();
    let resident = arena.resident_bytes();
    assert!(resident >= 40 << 20 && arena.claimed_bytes() == 0);
    let before = faults();
    let claims: Vec<Claim> = (0..40).map(|_| arena.claim(1 << 20).unwrap()).collect();
    for claim in &claims {
        // SAFETY: the claim is ours alone.
        unsafe { claim.as_ptr().write_bytes(1, claim.len()) };
    }
    assert_eq!(arena.resident_bytes(), resident);
    assert!(faults() - before < 100, "{} faults", faults() - before);
    let error = arena.prepare(30 << 20).unwrap_err();
    assert!(matches!(error, MemoryError::ArenaFull { .. }), "{error}");
    arena.prepare(24 << 20).unwrap();
}
