//! Every frame comes back as it was, however it is cut; everything else is an error.

use super::*;

fn orders() -> Vec<Order> {
    let instruction = Instruction {
        settings: vec![
            ("A".into(), "b c\n".into()),
            ("BYTES".into(), OsString::from_vec(vec![0xff, b'=', 0xfe])),
        ],
        key: Some("00ff".into()),
        arguments: vec!["--".into(), "python".into(), String::new().into()],
        folder: "/data".into(),
        virtual_environment: Some("/venv".into()),
        scheduler: true,
        servers: vec![(0, 8), (3, 1)],
        worker_id: 2,
        workers: 4,
        slots: vec![0, 3],
    };
    vec![
        Order::Probe("10.0.0.1:9".into()),
        Order::Start(Box::new(instruction)),
        Order::Start(Box::default()),
        Order::Signal { process: 7, signal: 15 },
        Order::TellTheEnd { process: 0 },
    ]
}

fn reports() -> Vec<Report> {
    let hello = Hello {
        protocol: PROTOCOL,
        version: "1.2.3".into(),
        devices: 8,
        ports: [1, 2, 65_535],
        connection: "10.0.0.1 4 10.0.0.2 22".into(),
        interfaces: vec![("lo".into(), "127.0.0.1".into())],
    };
    vec![
        Report::Hello(hello),
        Report::Probed(true),
        Report::Note("a note".into()),
        Report::Refused { code: 127, why: "no such file".into() },
        Report::Started,
        Report::Output { process: 3, target: 1, bytes: vec![0, 255, b'\n'] },
        Report::Output { process: 3, target: 0, bytes: Vec::new() },
        Report::Ended { process: 3, code: 139, how: "was killed by SIGSEGV (11)".into() },
        Report::Alive,
    ]
}

fn encoded<T: Encode>(frames: &[T]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes));
    bytes
}

fn decoded<T: Decode>(decoder: &mut Decoder) -> Result<Vec<T>, FrameError> {
    let mut frames = Vec::new();
    while let Some(frame) = decoder.next()? {
        frames.push(frame);
    }
    Ok(frames)
}

#[test]
fn frames_come_back_however_they_are_cut() {
    let bytes = encoded(&orders());
    for step in [1, 2, 3, 7, 64, bytes.len()] {
        let mut decoder = Decoder::of_launcher();
        let mut came = Vec::new();
        for piece in bytes.chunks(step) {
            decoder.push(piece);
            came.extend(decoded::<Order>(&mut decoder).unwrap());
        }
        assert_eq!(came, orders(), "in pieces of {step}");
    }
    let mut decoder = Decoder::of_agent();
    let noise = b"Welcome!\n\0bpslaunch age";
    let bytes = [noise, GREETING, &encoded(&reports())].concat();
    let mut came = Vec::new();
    for piece in bytes.chunks(5) {
        decoder.push(piece);
        came.extend(decoded::<Report>(&mut decoder).unwrap());
    }
    assert_eq!(came, reports());
}

#[test]
fn without_a_greeting_nothing_is_taken_for_long() {
    let mut decoder = Decoder::of_agent();
    decoder.push(&encoded(&[Report::Started]));
    assert_eq!(decoder.next::<Report>().unwrap(), None);
    assert_eq!(decoder.noise().len(), 5);
    decoder.push(&vec![b'x'; NOISE_BYTES_MAX]);
    let count = NOISE_BYTES_MAX + 5;
    assert_eq!(decoder.next::<Report>().unwrap_err(), FrameError::NoGreeting(count));
}

#[test]
fn every_shortened_or_lengthened_frame_is_refused() {
    fn check<T: Encode + Decode + std::fmt::Debug + PartialEq>(frame: &T) {
        let mut whole = Vec::new();
        frame.encode(&mut whole);
        for length in 0..whole.len() - 4 {
            let mut bytes = whole[..4 + length].to_vec();
            bytes[..4].copy_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
            let mut decoder = Decoder::of_launcher();
            decoder.push(&bytes);
            assert!(decoder.next::<T>().is_err(), "{frame:?} cut to {length}");
        }
        let length = u32::try_from(whole.len() - 4 + 1).unwrap();
        whole[..4].copy_from_slice(&length.to_le_bytes());
        whole.push(0);
        let mut decoder = Decoder::of_launcher();
        decoder.push(&whole);
        let error = decoder.next::<T>().unwrap_err();
        assert!(matches!(error, FrameError::Long { bytes: 1, .. }), "{error}");
    }
    orders().iter().for_each(check);
    reports().iter().for_each(check);
}

#[test]
fn what_is_out_of_bounds_is_named() {
    let refused = |bytes: &[u8]| {
        let mut decoder = Decoder::of_launcher();
        decoder.push(bytes);
        decoder.next::<Order>().unwrap_err().to_string()
    };
    assert_eq!(refused(&[255, 255, 255, 255]), "a frame of 4294967295 bytes, more than 8388608");
    assert_eq!(refused(&[0, 0, 0, 0]), "an empty frame");
    assert_eq!(refused(&[1, 0, 0, 0, 99]), "a frame of the unknown kind 99");
    let signal = encoded(&[Order::Signal { process: 0, signal: 32 }]);
    assert_eq!(refused(&signal), "a frame of kind 3 whose signal is 32");
    let mut text = encoded(&[Order::Probe("ab".into())]);
    *text.last_mut().unwrap() = 0xff;
    assert_eq!(refused(&text), "a frame of kind 1 whose address is no text");
}

/// Any bytes at all, from a small generator whose seed is printed: no panic, and no memory for what
/// was only announced.
#[test]
fn any_bytes_are_frames_or_errors() {
    for seed in 1..20_000_u64 {
        let mut state = seed;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        // Half of them are frames in which some bytes were changed.
        let mut bytes = if seed % 2 == 0 {
            let mut all = orders();
            encoded(&[all.swap_remove(random() % 5)])
        } else {
            (0..random() % 80).map(|_| u8::try_from(random() % 256).unwrap()).collect()
        };
        for _ in 0..random() % 4 {
            let count = bytes.len().max(1);
            if let Some(byte) = bytes.get_mut(random() % count) {
                *byte = u8::try_from(random() % 256).unwrap();
            }
        }
        let take = |mut decoder: Decoder| {
            decoder.push(&bytes);
            let _ = decoded::<Order>(&mut decoder);
        };
        take(Decoder::of_launcher());
        let mut decoder = Decoder::of_agent();
        decoder.push(GREETING);
        decoder.push(&bytes);
        let _ = decoded::<Report>(&mut decoder);
    }
}
