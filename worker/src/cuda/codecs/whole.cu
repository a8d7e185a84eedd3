// Codecs that ask something of a whole part before an element of it is encoded: a sum, a norm, which
// elements are the largest. One block of threads has a part to itself, so that its threads can wait
// for each other; that leaves all processors of the GPU but one to others.

#include "elements.cuh"

// Threads of the block, as the host launches it.
#define PART_THREADS 1024
#define BOUNDED __attribute__((launch_bounds(PART_THREADS)))
#define SHARED static __attribute__((shared))
// Warps of the block: as many as a warp has threads, so that a warp can take one word of each.
#define WARPS (PART_THREADS / WARP)
#define BYTE 8

DEVICE u32 warp() { return thread() / WARP; }
DEVICE void barrier() { __syncthreads(); }
DEVICE u32 ballot(bool holds) { return __nvvm_vote_ballot_sync(ALL_LANES, holds); }
DEVICE u32 from_lane(u32 word, u32 lane) {
    return __nvvm_shfl_sync_idx_i32(ALL_LANES, word, lane, WARP - 1);
}
DEVICE u32 lanes_below() { return (1u << lane()) - 1; }
DEVICE u32 divided_up(u32 number, u32 by) { return number / by + (number % by != 0); }

template <class Element>
DEVICE float element_at(const void *tensor, u32 index) {
    return Element::load(((const typename Element::Memory *)tensor)[index]);
}

template <class Element>
DEVICE void set_element(void *tensor, u32 index, float value) {
    ((typename Element::Memory *)tensor)[index] = Element::store(value);
}

// The word at a place of `bytes` bytes, which are aligned to four; behind their end are zeros.
DEVICE u32 word_at(const u8 *in, u32 place, u32 bytes) {
    u32 first = place * 4;
    if (first + 4 <= bytes) return *(const u32 *)(in + first);
    u32 word = 0;
    for (u32 i = 0; first + i < bytes; i++) word |= (u32)in[first + i] << (BYTE * i);
    return word;
}

DEVICE void set_word(u8 *out, u32 place, u32 bytes, u32 word) {
    u32 first = place * 4;
    if (first + 4 <= bytes) {
        *(u32 *)(out + first) = word;
        return;
    }
    for (u32 i = 0; first + i < bytes; i++) out[first + i] = (u8)(word >> (BYTE * i));
}

// ---- What is asked of a whole part: `engine/src/encode/fold.rs`

template <class Element>
DEVICE u32 magnitude_at(const void *tensor, u32 index) {
    return bits_of(element_at<Element>(tensor, index)) & MAGNITUDE;
}

template <class Element>
DEVICE u32 largest_magnitude(u32 elements, const void *tensor) {
    SHARED u32 of_warps[WARPS];
    u32 largest = 0;
    for (u32 i = thread(); i < elements; i += PART_THREADS) {
        u32 magnitude = magnitude_at<Element>(tensor, i);
        if (magnitude > largest) largest = magnitude;
    }
    largest = largest_of_warp(largest);
    if (lane() == 0) of_warps[warp()] = largest;
    barrier();
    return largest_of_warp(of_warps[lane()]);
}

// Partial sums, as many as the processor has. Each has a fixed order of addition, so a thread computes
// it alone, from tiles that all threads fetch: one tile is added up while the next comes.
#define SUMS 32
#define TILE 4096

template <class Element, bool SQUARES>
DEVICE double sum_of_part(u32 elements, const void *tensor) {
    SHARED float tiles[2][TILE];
    SHARED double sums[SUMS];
    u32 count = divided_up(elements, TILE);
    double sum = 0.0;
    for (u32 tile = 0; tile <= count; tile++) {
        for (u32 i = thread(); i < TILE && tile < count; i += PART_THREADS) {
            u32 index = tile * TILE + i;
            // A zero more changes no sum.
            tiles[tile % 2][i] = index < elements ? element_at<Element>(tensor, index) : 0.0f;
        }
        if (tile > 0 && thread() < SUMS) {
            const float *before = tiles[(tile - 1) % 2];
            for (u32 i = thread(); i < TILE; i += SUMS) {
                double wide = (double)before[i];
                sum += SQUARES ? wide * wide : __builtin_fabs(wide);
            }
        }
        barrier();
    }
    if (thread() < SUMS) sums[thread()] = sum;
    barrier();
    double folded[SUMS];
    for (u32 i = 0; i < SUMS; i++) folded[i] = sums[i];
    for (u32 width = SUMS / 2; width > 0; width /= 2) {
        for (u32 i = 0; i < width; i++) folded[i] += folded[i + width];
    }
    return folded[0];
}

// ---- One bit an element: `engine/src/encode/onebit.rs`

#define DOUBLE_MAX 1.7976931348623157e308

template <class Element>
DEVICE u32 onebit_scale(u32 elements, const void *tensor, u32 scaling) {
    if (elements == 0) return 0;
    if (!scaling) {
        bool is_finite = largest_magnitude<Element>(elements, tensor) < INFINITY_BITS;
        return is_finite ? bits_of(1.0f) : NAN_BITS;
    }
    double mean = sum_of_part<Element, false>(elements, tensor) / (double)elements;
    return mean <= DOUBLE_MAX ? bits_of((float)mean) : NAN_BITS;
}

// A warp takes as many words as it has threads, of as many bits. All threads make each word together;
// each then has one of them.
template <class Element, bool REST = false>
DEVICE void encode_onebit(u32 elements, void *tensor, void *wire, u32 scaling) {
    u32 scale = onebit_scale<Element>(elements, tensor, scaling);
    if (thread() == 0) *(u32 *)wire = scale;
    u8 *bits = (u8 *)wire + sizeof(float);
    u32 bytes = divided_up(elements, BYTE);
    for (u32 first = warp() * WARP * WARP; first < elements; first += WARPS * WARP * WARP) {
        u32 mine = 0;
        for (u32 i = 0; i < WARP; i++) {
            u32 index = first + i * WARP + lane();
            float value = index < elements ? element_at<Element>(tensor, index) : 0.0f;
            bool is_negative = value < 0.0f;
            u32 word = ballot(is_negative);
            if (lane() == i) mine = word;
            if (REST && index < elements) {
                float sent = float_of(scale ^ (u32)is_negative << 31);
                set_element<Element>(tensor, index, rest_of(value, sent));
            }
        }
        set_word(bits, first / WARP + lane(), bytes, mine);
    }
}

template <class Element>
DEVICE void decode_onebit(u32 elements, const void *wire, void *tensor) {
    u32 scale = *(const u32 *)wire;
    const u8 *bits = (const u8 *)wire + sizeof(float);
    u32 bytes = divided_up(elements, BYTE);
    for (u32 first = warp() * WARP * WARP; first < elements; first += WARPS * WARP * WARP) {
        u32 mine = word_at(bits, first / WARP + lane(), bytes);
        for (u32 i = 0; i < WARP; i++) {
            u32 index = first + i * WARP + lane();
            u32 bit = from_lane(mine, i) >> lane() & 1;
            if (index < elements) set_element<Element>(tensor, index, float_of(scale ^ bit << 31));
        }
    }
}

// ---- A few elements: `engine/src/encode/sparse.rs`

// Before a few elements are set.
template <class Element>
DEVICE void set_zeros(u32 elements, void *tensor) {
    for (u32 i = thread(); i < elements; i += PART_THREADS) set_element<Element>(tensor, i, 0.0f);
    barrier();
}

// Values stand behind indices of 16 bits, so they need not be aligned to more.
DEVICE void set_value(u16 *out, u32 place, float value) {
    out[2 * place] = (u16)bits_of(value);
    out[2 * place + 1] = (u16)(bits_of(value) >> 16);
}

DEVICE float value_at(const u16 *in, u32 place) {
    return float_of(in[2 * place] | (u32)in[2 * place + 1] << 16);
}

#define BINS 2048
// Elements that a thread fetches before it counts them: a count would hold up the next.
#define AHEAD 8

struct Digit {
    u32 digit, wanted;
};

// The highest bin with which there are `wanted`, and how many of it are wanted then.
DEVICE Digit highest(const u32 *bins, u32 wanted) {
    SHARED Digit found;
    if (warp() == 0) {
        const u32 each = BINS / WARP;
        u32 first = BINS - 1 - lane() * each;
        u32 held = 0;
        for (u32 i = 0; i < each; i++) held += bins[first - i];
        u32 above = held;
        for (u32 distance = 1; distance < WARP; distance *= 2) {
            u32 other = __nvvm_shfl_sync_up_i32(ALL_LANES, above, distance, 0);
            if (lane() >= distance) above += other;
        }
        above -= held;
        if (above < wanted && wanted <= above + held) {
            u32 digit = first;
            while (above + bins[digit] < wanted) above += bins[digit--];
            found = Digit{digit, wanted - above};
        }
    }
    barrier();
    return found;
}

struct Threshold {
    // The magnitude of the last element that is sent, and how many of just this are.
    u32 least, ties;
};

// Digit by digit from the highest: 11, 10 and 10 bits.
template <class Element>
DEVICE Threshold threshold(u32 elements, const void *tensor, u32 count) {
    SHARED u32 bins[BINS];
    Threshold it = {0, count};
    for (u32 shift = 20; true; shift -= 10) {
        u32 bits = shift == 20 ? 11 : 10;
        for (u32 i = thread(); i < BINS; i += PART_THREADS) bins[i] = 0;
        barrier();
        for (u32 first = thread(); first < elements; first += PART_THREADS * AHEAD) {
            u32 magnitudes[AHEAD];
            for (u32 i = 0; i < AHEAD; i++) {
                u32 index = first + i * PART_THREADS;
                // No magnitude has the highest bit.
                magnitudes[i] = index < elements ? magnitude_at<Element>(tensor, index) : ~0u;
            }
            for (u32 i = 0; i < AHEAD; i++) {
                if (magnitudes[i] >> (shift + bits) != it.least) continue;
                u32 digit = magnitudes[i] >> shift & ((1u << bits) - 1);
                __atomic_fetch_add(&bins[digit], 1u, __ATOMIC_RELAXED);
            }
        }
        barrier();
        Digit next = highest(bins, it.ties);
        it = Threshold{it.least << bits | next.digit, next.wanted};
        if (shift == 0) return it;
    }
}

// Each warp has elements that follow each other. It counts what it will send, so that all know where to
// write, and then sends.
template <class Element, bool REST = false>
DEVICE void encode_topk(u32 elements, void *tensor, void *wire, u32 count) {
    SHARED u32 larger_of[WARPS], ties_of[WARPS];
    if (elements == 0) return;
    Threshold it = threshold<Element>(elements, tensor, count);
    u32 each = divided_up(divided_up(elements, WARP), WARPS) * WARP;
    u32 begin = warp() * each;
    u32 end = begin + each < elements ? begin + each : elements;
    u32 larger = 0, ties = 0;
    for (u32 first = begin; first < end; first += WARP) {
        u32 index = first + lane();
        u32 magnitude = index < end ? magnitude_at<Element>(tensor, index) : 0;
        larger += __builtin_popcount(ballot(index < end && magnitude > it.least));
        ties += __builtin_popcount(ballot(index < end && magnitude == it.least));
    }
    if (lane() == 0) larger_of[warp()] = larger, ties_of[warp()] = ties;
    barrier();
    larger = ties = 0;
    for (u32 i = 0; i < warp(); i++) larger += larger_of[i], ties += ties_of[i];
    bool is_narrow = elements <= 1u << 16;
    u16 *narrow = (u16 *)wire;
    u32 *indices = (u32 *)wire;
    u16 *values = is_narrow ? narrow + count : narrow + 2 * (u64)count;
    for (u32 first = begin; first < end; first += WARP) {
        u32 index = first + lane();
        float value = index < end ? element_at<Element>(tensor, index) : 0.0f;
        u32 magnitude = bits_of(value) & MAGNITUDE;
        bool is_larger = index < end && magnitude > it.least;
        bool is_tie = index < end && magnitude == it.least;
        u32 all_larger = ballot(is_larger), all_ties = ballot(is_tie);
        u32 ties_before = ties + __builtin_popcount(all_ties & lanes_below());
        u32 larger_before = larger + __builtin_popcount(all_larger & lanes_below());
        u32 place = larger_before + (ties_before < it.ties ? ties_before : it.ties);
        bool is_sent = is_larger || (is_tie && ties_before < it.ties);
        if (REST && index < end && (is_sent || magnitude >= INFINITY_BITS)) {
            set_element<Element>(tensor, index, 0.0f);
        }
        if (is_sent) {
            if (is_narrow) {
                narrow[place] = (u16)index;
            } else {
                indices[place] = index;
            }
            set_value(values, place, value);
        }
        larger += __builtin_popcount(all_larger);
        ties += __builtin_popcount(all_ties);
    }
}

template <class Element>
DEVICE void decode_topk(u32 elements, const void *wire, void *tensor, u32 count) {
    set_zeros<Element>(elements, tensor);
    bool is_narrow = elements <= 1u << 16;
    const u16 *narrow = (const u16 *)wire;
    const u32 *indices = (const u32 *)wire;
    const u16 *values = is_narrow ? narrow + count : narrow + 2 * (u64)count;
    for (u32 i = thread(); i < count; i += PART_THREADS) {
        u32 index = is_narrow ? narrow[i] : indices[i];
        if (index < elements) set_element<Element>(tensor, index, value_at(values, i));
    }
}

// One index of each of `count` strata.
struct Strata {
    u64 elements, length;
    u32 count;
    Noise noise;

    DEVICE Strata of(u32 elements, u32 count, u64 seed, u64 draw) {
        u64 length = ((u64)elements << 32) / (count > 0 ? count : 1);
        return Strata{elements, length, count, Noise::of(seed, draw)};
    }

    DEVICE u64 start(Strata it, u32 stratum) { return (u64)stratum * it.length >> 32; }

    DEVICE u32 index(Strata it, u32 stratum) {
        u64 first = start(it, stratum);
        u64 end = stratum + 1 == it.count ? it.elements : start(it, stratum + 1);
        return (u32)(first + ((end - first) * Noise::at(it.noise, stratum) >> 32));
    }
};

template <class Element, bool REST = false>
DEVICE void encode_randomk(u32 elements, void *tensor, void *wire, Strata strata) {
    bool is_finite = largest_magnitude<Element>(elements, tensor) < INFINITY_BITS;
    float *values = (float *)wire;
    for (u32 i = thread(); REST && !is_finite && i < elements; i += PART_THREADS) {
        set_element<Element>(tensor, i, finite_or_zero(element_at<Element>(tensor, i)));
    }
    // What is drawn is set by another thread.
    if (REST) barrier();
    for (u32 i = thread(); i < strata.count; i += PART_THREADS) {
        u32 index = Strata::index(strata, i);
        values[i] = is_finite && index < elements ? element_at<Element>(tensor, index)
                                                  : float_of(NAN_BITS);
        if (REST && index < elements) set_element<Element>(tensor, index, 0.0f);
    }
}

template <class Element>
DEVICE void decode_randomk(u32 elements, const void *wire, void *tensor, Strata strata) {
    set_zeros<Element>(elements, tensor);
    const float *values = (const float *)wire;
    for (u32 i = thread(); i < strata.count; i += PART_THREADS) {
        u32 index = Strata::index(strata, i);
        if (index < elements) set_element<Element>(tensor, index, values[i]);
    }
}

// ---- A few levels: `engine/src/encode/dithering.rs`

#define NATURAL 1
#define L2 2
#define LINEAR_MAX 127
#define NATURAL_MAX 32
// Codes that are packed together: as many as bits in a byte, so that they are as many bytes as a code
// has bits.
#define GROUP 8
// Words of a group of each thread, over the threads: a code has 8 bits at most.
#define CODE_WORDS_MAX 2

struct Levels {
    u32 count, width;
    bool is_natural, is_l2;

    DEVICE Levels of(u32 option, u32 count) {
        bool is_natural = option & NATURAL;
        u32 most = is_natural ? NATURAL_MAX : LINEAR_MAX;
        if (count < 1) count = 1;
        if (count > most) count = most;
        return Levels{count, 1 + 32 - (u32)__builtin_clz(count), is_natural, (option & L2) != 0};
    }

    DEVICE float steps(Levels it, u32 level) {
        if (!it.is_natural) return (float)level;
        return level == 0 ? 0.0f : float_of((126 + level) << 23);
    }

    DEVICE u32 level(Levels it, float steps, u32 random) {
        u32 level;
        if (it.is_natural) {
            bool is_fraction = steps < 1.0f;
            float fixed = is_fraction ? steps + 1.0f : steps;
            level = ((bits_of(fixed) + (random >> 9)) >> 23) - (is_fraction ? 127 : 126);
        } else {
            u32 fixed = bits_of(steps + 256.0f);
            level = ((fixed + (random >> 17)) >> 15) - (bits_of(256.0f) >> 15);
        }
        return level > it.count ? it.count : level;
    }

    DEVICE u32 bytes(Levels it, u32 elements) {
        return elements / GROUP * it.width + divided_up(elements % GROUP * it.width, BYTE);
    }
};

template <class Element>
DEVICE float dithering_step(u32 elements, const void *tensor, Levels levels) {
    float norm;
    if (levels.is_l2) {
        norm = (float)__nvvm_sqrt_rn_d(sum_of_part<Element, true>(elements, tensor));
    } else {
        norm = float_of(largest_magnitude<Element>(elements, tensor));
    }
    if ((bits_of(norm) & MAGNITUDE) >= INFINITY_BITS) return float_of(NAN_BITS);
    float step = norm / Levels::steps(levels, levels.count);
    float least = float_of(SMALLEST_NORMAL_BITS);
    return step < least ? least : step;
}

// A thread has a group of codes. They are gathered in shared memory, so that words leave.
template <class Element, bool REST = false>
DEVICE void encode_dithering(
    u32 elements, void *tensor, void *wire, Levels levels, Noise noise) {
    SHARED u32 gathered[PART_THREADS * CODE_WORDS_MAX];
    float step = dithering_step<Element>(elements, tensor, levels);
    bool is_number = (bits_of(step) & MAGNITUDE) < INFINITY_BITS;
    if (thread() == 0) *(u32 *)wire = bits_of(step);
    u8 *codes = (u8 *)wire + sizeof(float);
    u32 bytes = Levels::bytes(levels, elements);
    u32 in_tile = PART_THREADS * levels.width;
    for (u32 done = 0, tile = 0; done < bytes; done += in_tile, tile += PART_THREADS * GROUP) {
        u64 group = 0;
        for (u32 i = 0; i < GROUP; i++) {
            u32 index = tile + thread() * GROUP + i;
            if (REST && index < elements && !is_number) {
                // A part that is sent as NaN leaves nothing.
                set_element<Element>(tensor, index, 0.0f);
            }
            if (index < elements && is_number) {
                u32 bits = bits_of(element_at<Element>(tensor, index));
                float steps = float_of(bits & MAGNITUDE) / step;
                u32 level = Levels::level(levels, steps, Noise::at(noise, index));
                u64 code = bits >> 31 << (levels.width - 1) | level;
                group |= code << (levels.width * i);
                if (REST) {
                    u32 sent = bits_of(Levels::steps(levels, level) * step) ^ bits >> 31 << 31;
                    set_element<Element>(tensor, index, rest_of(float_of(bits), float_of(sent)));
                }
            }
        }
        u8 *mine = (u8 *)gathered + thread() * levels.width;
        for (u32 i = 0; i < levels.width; i++) mine[i] = (u8)(group >> (BYTE * i));
        barrier();
        for (u32 i = thread(); i < in_tile / 4 && done + i * 4 < bytes; i += PART_THREADS) {
            set_word(codes, done / 4 + i, bytes, gathered[i]);
        }
        barrier();
    }
}

// A thread's words of the tile that begins behind `done` bytes.
DEVICE void fetch(const u8 *codes, u32 done, u32 bytes, u32 in_tile, u32 *words) {
    for (u32 i = 0; i < CODE_WORDS_MAX; i++) {
        u32 place = thread() + i * PART_THREADS;
        words[i] = place < in_tile / 4 ? word_at(codes, done / 4 + place, bytes) : 0;
    }
}

// The codes of the next tile come over the bus while those of a tile are decoded.
template <class Element>
DEVICE void decode_dithering(u32 elements, const void *wire, void *tensor, Levels levels) {
    const u32 each = CODE_WORDS_MAX;
    SHARED u32 gathered[PART_THREADS * each + 1];
    float step = *(const float *)wire;
    const u8 *codes = (const u8 *)wire + sizeof(float);
    u32 bytes = Levels::bytes(levels, elements);
    u32 in_tile = PART_THREADS * levels.width;
    u32 next[each];
    fetch(codes, 0, bytes, in_tile, next);
    for (u32 done = 0, tile = 0; tile < elements; tile += PART_THREADS * GROUP) {
        for (u32 i = 0; i < each; i++) gathered[thread() + i * PART_THREADS] = next[i];
        barrier();
        done += in_tile;
        fetch(codes, done, bytes, in_tile, next);
        for (u32 i = 0; i < GROUP; i++) {
            u32 at = thread() + i * PART_THREADS;
            u32 bit = at * levels.width;
            const u8 *in = (const u8 *)gathered + bit / BYTE;
            u32 code = (in[0] | (u32)in[1] << BYTE) >> bit % BYTE & ((1u << levels.width) - 1);
            u32 level = code & ((1u << (levels.width - 1)) - 1);
            u32 sign = code >> (levels.width - 1) << 31;
            float value = float_of(bits_of(Levels::steps(levels, level) * step) ^ sign);
            if (tile + at < elements) set_element<Element>(tensor, tile + at, value);
        }
        barrier();
    }
}

#define WHOLE(codec, element, ENCODE, DECODE)                                                     \
    KERNELS(BOUNDED KERNEL, codec, element, ENCODE, DECODE)

#define ALL(element, Element)                                                                     \
    WHOLE(onebit, element, (encode_onebit<Element>(elements, tensor, wire, option)),              \
          (decode_onebit<Element>(elements, wire, tensor)))                                       \
    WHOLE(topk, element, (encode_topk<Element>(elements, tensor, wire, count)),                   \
          (decode_topk<Element>(elements, wire, tensor, count)))                                  \
    WHOLE(randomk, element, (encode_randomk<Element>(elements, tensor, wire, STRATA)),            \
          (decode_randomk<Element>(elements, wire, tensor, STRATA)))                              \
    WHOLE(dithering, element,                                                                     \
          (encode_dithering<Element>(elements, tensor, wire, LEVELS, Noise::of(seed, draw))),     \
          (decode_dithering<Element>(elements, wire, tensor, LEVELS)))

#define STRATA (Strata::of(elements, count, seed, draw))
#define LEVELS (Levels::of(option, count))

EACH_ELEMENT(ALL)

#define WHOLE_KEEPER(codec, ENCODE) KEEPER(BOUNDED KERNEL, codec, ENCODE)

WHOLE_KEEPER(onebit, (encode_onebit<F32, true>(elements, tensor, wire, option)))
WHOLE_KEEPER(topk, (encode_topk<F32, true>(elements, tensor, wire, count)))
WHOLE_KEEPER(randomk, (encode_randomk<F32, true>(elements, tensor, wire, STRATA)))
WHOLE_KEEPER(dithering,
             (encode_dithering<F32, true>(elements, tensor, wire, LEVELS, Noise::of(seed, draw))))
