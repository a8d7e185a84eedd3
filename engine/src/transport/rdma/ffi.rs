//! libibverbs, opened at run time: the functions and the memory layouts that this transport uses.
//!
//! A program that holds this starts on machines without RDMA; what is missing is an error when RDMA
//! is asked for. The layouts are those of `infiniband/verbs.h`, which promises to keep them;
//! `tests/rdma` compares each size and offset with the installed header. Calls on the data path
//! (`post_send`, `post_recv`, `poll_cq`, `req_notify_cq`) go through the table of the context, as
//! the inline functions of that header do.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// Declares structs as C lays them out, and lists their sizes and offsets for the test.
macro_rules! layouts {
    ($($(#[$doc:meta])* struct $name:ident as $c:literal {
        $($field:ident $(as $cfield:literal)?: $type:ty,)*
    })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            pub(super) struct $name { $(pub(super) $field: $type,)* }
        )*
        /// Lines `struct [field] number`: each struct's size and each field's offset, by the
        /// names of the C header.
        pub fn layouts() -> Vec<String> {
            let mut lines = Vec::new();
            $(
                lines.push(format!("{} {}", $c, size_of::<$name>()));
                $($(
                    let offset = std::mem::offset_of!($name, $field);
                    lines.push(format!("{} {} {offset}", $c, $cfield));
                )?)*
            )*
            lines
        }
    };
}

type Compat = *const c_void;

layouts! {
    /// The calls of a context's provider that skip the library.
    struct ContextOps as "struct ibv_context_ops" {
        before_poll: [Compat; 11],
        poll_cq as "poll_cq": Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
        req_notify_cq as "req_notify_cq": Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
        before_send: [Compat; 12],
        post_send as "post_send":
            Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
        post_recv as "post_recv":
            Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
        after: [Compat; 5],
    }
    /// An opened device.
    struct Context as "struct ibv_context" {
        device as "device": *mut Device,
        ops as "ops": ContextOps,
        cmd_fd as "cmd_fd": c_int,
        async_fd as "async_fd": c_int,
        num_comp_vectors as "num_comp_vectors": c_int,
        mutex: [u64; 5],
        abi_compat as "abi_compat": *mut c_void,
    }
    /// The calls of a newer provider: the end of that struct, which grows at its front.
    struct ContextTail as "tail verbs_context" {
        query_device_ex as "query_device_ex":
            Option<unsafe extern "C" fn(*mut Context, Compat, *mut DeviceAttrEx, usize) -> c_int>,
        before_size: [Compat; 11],
        sz as "sz": usize,
        context as "context": Context,
    }
    /// What a device can do: the fields up to those of paging on demand.
    struct DeviceAttrEx as "prefix ibv_device_attr_ex" {
        orig_attr: [u64; 29],
        comp_mask as "comp_mask": u32,
        general_caps as "odp_caps.general_caps": u64,
        rc_odp_caps as "odp_caps.per_transport_caps.rc_odp_caps": u32,
        other_caps: [u32; 2],
        // The library of another release may fill more.
        rest: [u64; 32],
    }
    /// What happened to a device.
    struct AsyncEvent as "struct ibv_async_event" {
        element as "element": u64,
        event_type as "event_type": c_int,
    }
    /// A queue of completions: its first fields.
    struct Cq as "prefix ibv_cq" {
        context as "context": *mut Context,
        channel as "channel": *mut Channel,
        cq_context as "cq_context": *mut c_void,
        handle as "handle": u32,
        cqe as "cqe": c_int,
    }
    /// A queue pair: its first fields.
    struct Qp as "prefix ibv_qp" {
        context as "context": *mut Context,
        qp_context as "qp_context": *mut c_void,
        pd as "pd": *mut Pd,
        send_cq as "send_cq": *mut Cq,
        recv_cq as "recv_cq": *mut Cq,
        srq as "srq": *mut c_void,
        handle as "handle": u32,
        qp_num as "qp_num": u32,
    }
    /// A registered range of memory.
    struct Mr as "struct ibv_mr" {
        context as "context": *mut Context,
        pd as "pd": *mut Pd,
        addr as "addr": *mut c_void,
        length as "length": usize,
        handle as "handle": u32,
        lkey as "lkey": u32,
        rkey as "rkey": u32,
    }
    /// Where a device tells that a queue has completions.
    struct Channel as "struct ibv_comp_channel" {
        context as "context": *mut Context,
        fd as "fd": c_int,
        refcnt as "refcnt": c_int,
    }
    /// A run of registered memory.
    struct Sge as "struct ibv_sge" {
        addr as "addr": u64,
        length as "length": u32,
        lkey as "lkey": u32,
    }
    /// One operation to send. What follows `rkey` belongs to operations that are not used here.
    struct SendWr as "struct ibv_send_wr" {
        wr_id as "wr_id": u64,
        next as "next": *mut SendWr,
        sg_list as "sg_list": *mut Sge,
        num_sge as "num_sge": c_int,
        opcode as "opcode": c_int,
        send_flags as "send_flags": c_uint,
        imm_data as "imm_data": u32,
        remote_addr as "wr.rdma.remote_addr": u64,
        rkey as "wr.rdma.rkey": u32,
        rest: [u32; 19],
    }
    /// One place to receive.
    struct RecvWr as "struct ibv_recv_wr" {
        wr_id as "wr_id": u64,
        next as "next": *mut RecvWr,
        sg_list as "sg_list": *mut Sge,
        num_sge as "num_sge": c_int,
    }
    /// What became of an operation.
    struct Wc as "struct ibv_wc" {
        wr_id as "wr_id": u64,
        status as "status": c_int,
        opcode as "opcode": c_int,
        vendor_err as "vendor_err": u32,
        byte_len as "byte_len": u32,
        imm_data as "imm_data": u32,
        qp_num as "qp_num": u32,
        src_qp as "src_qp": u32,
        wc_flags as "wc_flags": c_uint,
        pkey_index as "pkey_index": u16,
        slid as "slid": u16,
        sl as "sl": u8,
        dlid_path_bits as "dlid_path_bits": u8,
    }
    /// How much a queue pair holds.
    struct QpCap as "struct ibv_qp_cap" {
        max_send_wr as "max_send_wr": u32,
        max_recv_wr as "max_recv_wr": u32,
        max_send_sge as "max_send_sge": u32,
        max_recv_sge as "max_recv_sge": u32,
        max_inline_data as "max_inline_data": u32,
    }
    /// What a queue pair is made with.
    struct QpInitAttr as "struct ibv_qp_init_attr" {
        qp_context as "qp_context": *mut c_void,
        send_cq as "send_cq": *mut Cq,
        recv_cq as "recv_cq": *mut Cq,
        srq as "srq": *mut c_void,
        cap as "cap": QpCap,
        qp_type as "qp_type": c_int,
        sq_sig_all as "sq_sig_all": c_int,
    }
    /// The way to a peer.
    struct AhAttr as "struct ibv_ah_attr" {
        dgid as "grh.dgid": [u64; 2],
        flow_label as "grh.flow_label": u32,
        sgid_index as "grh.sgid_index": u8,
        hop_limit as "grh.hop_limit": u8,
        traffic_class as "grh.traffic_class": u8,
        dlid as "dlid": u16,
        sl as "sl": u8,
        src_path_bits as "src_path_bits": u8,
        static_rate as "static_rate": u8,
        is_global as "is_global": u8,
        port_num as "port_num": u8,
    }
    /// What a queue pair is changed to.
    struct QpAttr as "struct ibv_qp_attr" {
        qp_state as "qp_state": c_int,
        cur_qp_state as "cur_qp_state": c_int,
        path_mtu as "path_mtu": c_int,
        path_mig_state as "path_mig_state": c_int,
        qkey as "qkey": u32,
        rq_psn as "rq_psn": u32,
        sq_psn as "sq_psn": u32,
        dest_qp_num as "dest_qp_num": u32,
        qp_access_flags as "qp_access_flags": c_uint,
        cap as "cap": QpCap,
        ah_attr as "ah_attr": AhAttr,
        alt_ah_attr as "alt_ah_attr": AhAttr,
        pkey_index as "pkey_index": u16,
        alt_pkey_index as "alt_pkey_index": u16,
        en_sqd_async_notify as "en_sqd_async_notify": u8,
        sq_draining as "sq_draining": u8,
        max_rd_atomic as "max_rd_atomic": u8,
        max_dest_rd_atomic as "max_dest_rd_atomic": u8,
        min_rnr_timer as "min_rnr_timer": u8,
        port_num as "port_num": u8,
        timeout as "timeout": u8,
        retry_cnt as "retry_cnt": u8,
        rnr_retry as "rnr_retry": u8,
        alt_port_num as "alt_port_num": u8,
        alt_timeout as "alt_timeout": u8,
        rate_limit as "rate_limit": u32,
    }
    /// What a port is: the fields that the exported function fills.
    struct PortAttr as "prefix ibv_port_attr" {
        state as "state": c_int,
        max_mtu as "max_mtu": c_int,
        active_mtu as "active_mtu": c_int,
        gid_tbl_len as "gid_tbl_len": c_int,
        port_cap_flags as "port_cap_flags": u32,
        max_msg_sz as "max_msg_sz": u32,
        bad_pkey_cntr as "bad_pkey_cntr": u32,
        qkey_viol_cntr as "qkey_viol_cntr": u32,
        pkey_tbl_len as "pkey_tbl_len": u16,
        lid as "lid": u16,
        // The library of another release may fill more.
        rest: [u64; 8],
    }
}

impl AsyncEvent {
    /// The queue pair that the event is of, where it is of one.
    pub(super) fn qp(&self) -> *mut Qp {
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.element).unwrap_or(0))
    }

    /// The completion queue that the event is of, where it is of one.
    pub(super) fn cq(&self) -> *mut Cq {
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.element).unwrap_or(0))
    }

    /// The number of the port that the event is of, where it is of one.
    pub(super) fn port(&self) -> u8 {
        self.element.to_ne_bytes()[0]
    }
}

/// A device that can be opened; the library's own.
pub(super) enum Device {}
/// A protection domain; the library's own.
pub(super) enum Pd {}

pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(super) const ACCESS_ON_DEMAND: c_int = 1 << 6;
pub(super) const ODP_SUPPORT: u64 = 1;
pub(super) const ODP_SUPPORT_IMPLICIT: u64 = 1 << 1;
pub(super) const ODP_SUPPORT_WRITE: u32 = 1 << 2;
pub(super) const EVENT_CQ_ERR: c_int = 0;
pub(super) const EVENT_QP_FATAL: c_int = 1;
pub(super) const EVENT_QP_REQ_ERR: c_int = 2;
pub(super) const EVENT_QP_ACCESS_ERR: c_int = 3;
pub(super) const EVENT_DEVICE_FATAL: c_int = 8;
pub(super) const EVENT_PORT_ERR: c_int = 10;
pub(super) const QP_TYPE_RC: c_int = 2;
pub(super) const STATE_INIT: c_int = 1;
pub(super) const STATE_RTR: c_int = 2;
pub(super) const STATE_RTS: c_int = 3;
pub(super) const STATE_ERROR: c_int = 6;
pub(super) const ATTR_STATE: c_int = 1 << 0;
pub(super) const ATTR_ACCESS_FLAGS: c_int = 1 << 3;
pub(super) const ATTR_PKEY_INDEX: c_int = 1 << 4;
pub(super) const ATTR_PORT: c_int = 1 << 5;
pub(super) const ATTR_AV: c_int = 1 << 7;
pub(super) const ATTR_PATH_MTU: c_int = 1 << 8;
pub(super) const ATTR_TIMEOUT: c_int = 1 << 9;
pub(super) const ATTR_RETRY_CNT: c_int = 1 << 10;
pub(super) const ATTR_RNR_RETRY: c_int = 1 << 11;
pub(super) const ATTR_RQ_PSN: c_int = 1 << 12;
pub(super) const ATTR_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(super) const ATTR_MIN_RNR_TIMER: c_int = 1 << 15;
pub(super) const ATTR_SQ_PSN: c_int = 1 << 16;
pub(super) const ATTR_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(super) const ATTR_DEST_QPN: c_int = 1 << 20;
pub(super) const WRITE: c_int = 0;
pub(super) const WRITE_WITH_IMM: c_int = 1;
pub(super) const SEND_SIGNALED: c_uint = 1 << 1;
pub(super) const SEND_SOLICITED: c_uint = 1 << 2;
pub(super) const SEND_INLINE: c_uint = 1 << 3;
pub(super) const WC_SUCCESS: c_int = 0;
pub(super) const WC_FLUSHED: c_int = 5;

/// Lines `name number`: the constants above, by the names of the C header.
pub fn constants() -> Vec<String> {
    let constants = [
        ("IBV_ACCESS_LOCAL_WRITE", i64::from(ACCESS_LOCAL_WRITE)),
        ("IBV_ACCESS_REMOTE_WRITE", i64::from(ACCESS_REMOTE_WRITE)),
        ("IBV_ACCESS_ON_DEMAND", i64::from(ACCESS_ON_DEMAND)),
        ("IBV_ODP_SUPPORT", ODP_SUPPORT.cast_signed()),
        ("IBV_ODP_SUPPORT_IMPLICIT", ODP_SUPPORT_IMPLICIT.cast_signed()),
        ("IBV_ODP_SUPPORT_WRITE", i64::from(ODP_SUPPORT_WRITE)),
        ("IBV_EVENT_CQ_ERR", i64::from(EVENT_CQ_ERR)),
        ("IBV_EVENT_QP_FATAL", i64::from(EVENT_QP_FATAL)),
        ("IBV_EVENT_QP_REQ_ERR", i64::from(EVENT_QP_REQ_ERR)),
        ("IBV_EVENT_QP_ACCESS_ERR", i64::from(EVENT_QP_ACCESS_ERR)),
        ("IBV_EVENT_DEVICE_FATAL", i64::from(EVENT_DEVICE_FATAL)),
        ("IBV_EVENT_PORT_ERR", i64::from(EVENT_PORT_ERR)),
        ("IBV_QPT_RC", i64::from(QP_TYPE_RC)),
        ("IBV_QPS_INIT", i64::from(STATE_INIT)),
        ("IBV_QPS_RTR", i64::from(STATE_RTR)),
        ("IBV_QPS_RTS", i64::from(STATE_RTS)),
        ("IBV_QPS_ERR", i64::from(STATE_ERROR)),
        ("IBV_QP_STATE", i64::from(ATTR_STATE)),
        ("IBV_QP_ACCESS_FLAGS", i64::from(ATTR_ACCESS_FLAGS)),
        ("IBV_QP_PKEY_INDEX", i64::from(ATTR_PKEY_INDEX)),
        ("IBV_QP_PORT", i64::from(ATTR_PORT)),
        ("IBV_QP_AV", i64::from(ATTR_AV)),
        ("IBV_QP_PATH_MTU", i64::from(ATTR_PATH_MTU)),
        ("IBV_QP_TIMEOUT", i64::from(ATTR_TIMEOUT)),
        ("IBV_QP_RETRY_CNT", i64::from(ATTR_RETRY_CNT)),
        ("IBV_QP_RNR_RETRY", i64::from(ATTR_RNR_RETRY)),
        ("IBV_QP_RQ_PSN", i64::from(ATTR_RQ_PSN)),
        ("IBV_QP_MAX_QP_RD_ATOMIC", i64::from(ATTR_MAX_QP_RD_ATOMIC)),
        ("IBV_QP_MIN_RNR_TIMER", i64::from(ATTR_MIN_RNR_TIMER)),
        ("IBV_QP_SQ_PSN", i64::from(ATTR_SQ_PSN)),
        ("IBV_QP_MAX_DEST_RD_ATOMIC", i64::from(ATTR_MAX_DEST_RD_ATOMIC)),
        ("IBV_QP_DEST_QPN", i64::from(ATTR_DEST_QPN)),
        ("IBV_WR_RDMA_WRITE", i64::from(WRITE)),
        ("IBV_WR_RDMA_WRITE_WITH_IMM", i64::from(WRITE_WITH_IMM)),
        ("IBV_SEND_SIGNALED", i64::from(SEND_SIGNALED)),
        ("IBV_SEND_SOLICITED", i64::from(SEND_SOLICITED)),
        ("IBV_SEND_INLINE", i64::from(SEND_INLINE)),
        ("IBV_WC_SUCCESS", i64::from(WC_SUCCESS)),
        ("IBV_WC_WR_FLUSH_ERR", i64::from(WC_FLUSHED)),
    ];
    constants.iter().map(|(name, value)| format!("{name} {value}")).collect()
}

/// Declares the table of exported functions and how it is filled.
macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of libibverbs.
        pub(super) struct Verbs {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Releases before 34 have none.
            pub(super) reg_dmabuf_mr: Option<RegisterDmaBuf>,
        }
        impl Verbs {
            fn fill(library: *mut c_void) -> Result<Verbs, String> {
                Ok(Verbs { $(
                    // SAFETY: the symbol is the function of this name, whose C declaration has
                    // these parameters; a missing one is an error of `symbol`.
                    $name: unsafe {
                        std::mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?,
                        >(symbol(library, $symbol)?)
                    },
                )*
                    reg_dmabuf_mr: symbol(library, c"ibv_reg_dmabuf_mr").ok().map(|found| {
                        // SAFETY: the symbol is the function of this name, of that C declaration.
                        unsafe { std::mem::transmute::<*mut c_void, RegisterDmaBuf>(found) }
                    }),
                })
            }
        }
    };
}

functions! {
    get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    free_device_list = c"ibv_free_device_list": fn(*mut *mut Device);
    get_device_name = c"ibv_get_device_name": fn(*mut Device) -> *const c_char;
    open_device = c"ibv_open_device": fn(*mut Device) -> *mut Context;
    close_device = c"ibv_close_device": fn(*mut Context) -> c_int;
    query_port = c"ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    alloc_pd = c"ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd = c"ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    reg_mr = c"ibv_reg_mr": fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    dereg_mr = c"ibv_dereg_mr": fn(*mut Mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel": fn(*mut Context) -> *mut Channel;
    destroy_comp_channel = c"ibv_destroy_comp_channel": fn(*mut Channel) -> c_int;
    create_cq = c"ibv_create_cq":
        fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut Cq;
    resize_cq = c"ibv_resize_cq": fn(*mut Cq, c_int) -> c_int;
    destroy_cq = c"ibv_destroy_cq": fn(*mut Cq) -> c_int;
    get_cq_event = c"ibv_get_cq_event": fn(*mut Channel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events": fn(*mut Cq, c_uint);
    create_qp = c"ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = c"ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp": fn(*mut Qp) -> c_int;
    fork_init = c"ibv_fork_init": fn() -> c_int;
    get_async_event = c"ibv_get_async_event": fn(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event = c"ibv_ack_async_event": fn(*mut AsyncEvent);
}

/// Domain, offset, length, address in requests, descriptor, access.
pub(super) type RegisterDmaBuf =
    unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;

const LIBRARY: &CStr = c"libibverbs.so.1";

impl Verbs {
    /// The library, opened and prepared by the first call. It is never closed.
    ///
    /// # Errors
    /// What the dynamic linker says of a library that can't be used.
    pub(super) fn load() -> Result<&'static Verbs, String> {
        static LOADED: OnceLock<Result<Verbs, String>> = OnceLock::new();
        LOADED.get_or_init(Verbs::open).as_ref().map_err(String::clone)
    }

    fn open() -> Result<Verbs, String> {
        // SAFETY: the name is a C string; the library's constructors are its own.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(last_error());
        }
        let verbs = Verbs::fill(library)?;
        // A child that is forked later must not take pages from under the device. Where the kernel
        // copies pinned pages for the child the call has nothing to do; it fails only where some
        // other part of this process has registered memory before, which then decided for all.
        // SAFETY: it takes nothing.
        let _ = unsafe { (verbs.fork_init)() };
        Ok(verbs)
    }
}

fn symbol(library: *mut c_void, name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: the library was opened and is never closed; the name is a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    if found.is_null() { Err(last_error()) } else { Ok(found) }
}

/// What the dynamic linker says of the last failure.
fn last_error() -> String {
    // SAFETY: it takes nothing; the text is valid until the next call of this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return format!("{LIBRARY:?} can't be opened");
    }
    // SAFETY: not null, so a C string, copied at once.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
