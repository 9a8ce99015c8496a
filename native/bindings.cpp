// The Python bindings of the codec. All slow operations run without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <span>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "codec.hpp"
#include "nonfinite.hpp"
#include "parallel.hpp"
#include "payload.hpp"
#include "progress.hpp"
#include "quantise_bindings.hpp"
#include "routing_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace deltawire {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;  // one entry per tensor
using Type = std::tuple<uint8_t, uint8_t, uint8_t, uint8_t, uint8_t>;  // code, bytes, width, exponent shift, exponent bits

ElementType element_type(const Type& t) {
    const auto [code, bytes, width, shift, bits] = t;
    const bool size = bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8, packed = width == 4 && (!bits || (shift == 0 && bits == 3));
    if (!size || (width != bytes * 8 && !packed) || bits > 11 || shift + bits > width) throw std::invalid_argument("the element type is not valid");
    return {code, bytes, width, shift, bits};
}

// Returns the memory of a NumPy array, which must be kept alive by the caller. There may be 100,000 of them, and nanobind's own arrays take longer.
View view_of(PyObject* array) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_STRIDED_RO)) throw nb::python_error();
    View v;
    v.data = static_cast<uint8_t*>(buffer.buf);
    v.bytes = uint8_t(buffer.itemsize);
    v.count = uint64_t(buffer.len / std::max<Py_ssize_t>(buffer.itemsize, 1));
    const bool size = buffer.itemsize == 1 || buffer.itemsize == 2 || buffer.itemsize == 4 || buffer.itemsize == 8;
    bool contiguous = reinterpret_cast<uintptr_t>(v.data) % v.bytes == 0;  // unaligned elements are copied, like strided ones
    Py_ssize_t expected = buffer.itemsize;
    for (int d = buffer.ndim; d-- > 0;) {
        contiguous &= buffer.shape[d] == 1 || buffer.strides[d] == expected || !v.count;
        expected *= buffer.shape[d];
    }
    if (!contiguous) {
        auto layout = std::make_shared<Layout>();
        layout->shape.assign(buffer.shape, buffer.shape + buffer.ndim);
        layout->strides.assign(buffer.strides, buffer.strides + buffer.ndim);
        if (!buffer.ndim) layout->shape = {1}, layout->strides = {v.bytes};
        v.layout = std::move(layout);
    }
    PyBuffer_Release(&buffer);
    if (!size) throw std::invalid_argument("an array has elements of another size than 1, 2, 4 or 8 bytes");
    return v;
}

// Contiguous tensors in columns: where they begin, how many elements they have, and how many bytes an element has. The caller keeps their memory alive.
class Addresses {
public:
    Addresses(const Column<uint64_t>& addresses, const Column<int64_t>& counts, const Column<uint8_t>& itemsizes, nb::object owner)
        : owner_(std::move(owner)) {
        if (counts.size() != addresses.size() || itemsizes.size() != addresses.size()) throw std::invalid_argument("columns differ in length");
        views_.resize(addresses.size());
        for (size_t t = 0; t < views_.size(); ++t) {
            const uint8_t bytes = itemsizes(t);
            if (bytes != 1 && bytes != 2 && bytes != 4 && bytes != 8) throw std::invalid_argument("an element has another size than 1, 2, 4 or 8 bytes");
            if (counts(t) < 0 || (counts(t) && (!addresses(t) || addresses(t) % bytes))) throw std::invalid_argument("an address or a number of elements is not valid");
            views_[t].data = reinterpret_cast<uint8_t*>(addresses(t));
            views_[t].count = uint64_t(counts(t));
            views_[t].bytes = bytes;
        }
    }

    const std::vector<View>& views() const { return views_; }

private:
    nb::object owner_;  // whatever keeps the memory alive
    std::vector<View> views_;
};

View zeros(uint64_t count, uint8_t bytes) {
    View v;
    v.count = count;
    v.bytes = bytes;
    return v;
}

// The items of a list or tuple.
std::span<PyObject*> items_of(const nb::object& sequence) {
    if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr())) throw nb::type_error("arrays must come in a list or a tuple");
    return {PySequence_Fast_ITEMS(sequence.ptr()), size_t(PySequence_Fast_GET_SIZE(sequence.ptr()))};
}

// Tensors that Python passes: a list or tuple of arrays, some of which may be None, or `Addresses`.
class Tensors {
public:
    explicit Tensors(const nb::object& given) {
        if (nb::isinstance<Addresses>(given)) views_ = nb::cast<const Addresses&>(given).views();
        else items_ = items_of(given);
    }

    size_t size() const { return std::max(items_.size(), views_.size()); }
    bool is_none(size_t t) const { return !items_.empty() && items_[t] == Py_None; }
    View at(size_t t) const { return items_.empty() ? views_[t] : view_of(items_[t]); }
    View checked(size_t t, const ElementType& type) const {
        View v = at(t);
        if (v.bytes != type.bytes) throw std::invalid_argument("array and element type differ in width");
        return v;
    }

private:
    std::span<PyObject*> items_;
    std::span<const View> views_;
};

void check_length(size_t length, size_t tensors) {
    if (length != tensors) throw std::invalid_argument("columns differ in length");
}

const Kernels& kernels_named(const std::string& name) {
    for (const Kernels* k : available_kernels())
        if (name == k->name) return *k;
    throw std::invalid_argument("no such instruction set on this machine: " + name);
}

nb::tuple tuple_of(const Lanes& lanes) { return nb::make_tuple(lanes[0], lanes[1], lanes[2], lanes[3]); }

// Passes a vector from C++ to Python without a copy.
template <class T>
nb::object own(std::vector<T>&& from) {
    auto* held = new std::vector<T>(std::move(from));
    nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(held->data(), {held->size()}, owner));
}

using PyEncodeGroup = std::tuple<Type, nb::object, nb::object, Column<uint64_t>>;  // type, bases (or None), new arrays, seeds

nb::list py_encode_groups(const std::vector<PyEncodeGroup>& groups, unsigned threads, const std::string& isa, Preparation* preparation) {
    std::vector<EncodeGroup> native;
    for (const auto& [type, bases, nexts, seeds] : groups) {
        EncodeGroup group{element_type(type), {}, {}, {seeds.data(), seeds.data() + seeds.size()}};
        const Tensors old(bases), now(nexts);
        check_length(old.size(), seeds.size());
        check_length(now.size(), seeds.size());
        group.bases.reserve(seeds.size());
        group.nexts.reserve(seeds.size());
        for (size_t t = 0; t < seeds.size(); ++t) {
            group.nexts.push_back(now.checked(t, group.type));
            const uint64_t count = group.nexts.back().count;
            group.bases.push_back(old.is_none(t) ? zeros(count, group.type.bytes) : old.checked(t, group.type));
            if (group.bases.back().count != count) throw std::invalid_argument("base and new differ in size");
        }
        native.push_back(std::move(group));
    }
    const Kernels& kernels = kernels_named(isa);
    std::vector<EncodedGroup> results;
    {
        nb::gil_scoped_release release;
        results = preparation ? encode_prepared(std::move(native), *preparation, threads, kernels) : encode(native, threads, kernels);
    }
    nb::list out;
    for (EncodedGroup& e : results) {
        nb::list blocks;
        for (auto& block : e.blocks) blocks.append(own(std::move(block)));
        out.append(nb::make_tuple(blocks, own(std::move(e.changed)), tuple_of(e.before), tuple_of(e.after)));
    }
    return out;
}

// Type, bases (or None), numbers of elements, seeds, payload or None, whether to write to each tensor.
using PyResolveGroup = std::tuple<Type, nb::object, Column<int64_t>, Column<uint64_t>, nb::object, Column<bool>>;

// A Resolution together with the Python objects whose memory it refers to.
class PyResolution {
public:
    PyResolution(unsigned threads, size_t budget, bool defer, const std::string& isa)
        : resolution_(threads, budget, defer, kernels_named(isa)) {}

    nb::list add(const std::vector<PyResolveGroup>& groups, bool old) {
        std::vector<ResolveGroup> native;
        for (const auto& [type, bases, counts, seeds, payload, write] : groups) {
            ResolveGroup group{element_type(type), {}, {seeds.data(), seeds.data() + seeds.size()}, {}, {}, !payload.is_none(), old};
            const Tensors tensors(bases);
            for (const size_t length : {tensors.size(), counts.size(), write.size()}) check_length(length, seeds.size());
            if (old && (seeds.size() != 1 || group.type.width == 4)) throw std::invalid_argument("an old payload has one tensor");
            held_.append(bases);
            group.bases.reserve(seeds.size());
            group.write.reserve(seeds.size());
            for (size_t t = 0; t < seeds.size(); ++t) {
                const bool added = tensors.is_none(t);
                if (counts(t) < 0) throw std::invalid_argument("a number of elements is negative");
                group.bases.push_back(added ? zeros(uint64_t(counts(t)), group.type.bytes) : tensors.checked(t, group.type));
                group.write.push_back(write(t) && !added);
            }
            if (!payload.is_none()) {
                payloads_.push_back(nb::cast<Bytes>(payload));
                group.payload = {payloads_.back().data(), payloads_.back().size()};
            }
            native.push_back(std::move(group));
        }
        std::vector<std::pair<uint64_t, uint8_t>> sizes;
        for (const ResolveGroup& group : native)
            for (const View& base : group.bases) sizes.emplace_back(base.count, base.bytes);
        std::vector<Resolution::Outcome> results;
        {
            nb::gil_scoped_release release;
            results = resolution_.add(std::move(native));
        }
        nb::list out;
        size_t tensor = 0;
        for (Resolution::Outcome& result : results) {
            for (const int64_t changed : result.changed) {
                tensors_.push_back({uint64_t(changed), sizes[tensor].first, sizes[tensor].second});
                ++tensor;
            }
            out.append(nb::make_tuple(own(std::move(result.changed)), tuple_of(result.before), tuple_of(result.after)));
        }
        return out;
    }

    // Returns the indices and the values (as bytes) of all tensors in two arrays; and for each tensor where its indices start, where its values start,
    // and how many there are.
    nb::tuple extract(const Column<int64_t>& tensors) {
        std::vector<Resolution::Extraction> wanted(tensors.size());
        std::vector<int64_t> index_starts(tensors.size()), value_starts(tensors.size()), counts(tensors.size());
        int64_t elements = 0, bytes = 0;
        for (size_t i = 0; i < tensors.size(); ++i) {
            const Tensor& tensor = tensors_.at(size_t(tensors(i)));
            wanted[i].tensor = size_t(tensors(i));
            index_starts[i] = elements;
            value_starts[i] = bytes;
            elements += int64_t(tensor.changed);
            bytes += int64_t((tensor.changed * tensor.bytes + 7) / 8 * 8);
        }
        std::vector<int64_t> indices(static_cast<size_t>(elements));
        std::vector<uint8_t> values(static_cast<size_t>(bytes));
        for (size_t i = 0; i < wanted.size(); ++i) {
            wanted[i].indices = indices.data() + index_starts[i];
            wanted[i].values = values.data() + value_starts[i];
        }
        {
            nb::gil_scoped_release release;
            resolution_.extract(wanted);
        }
        for (size_t i = 0; i < wanted.size(); ++i) counts[i] = int64_t(wanted[i].count);
        return nb::make_tuple(own(std::move(indices)), own(std::move(values)), index_starts, value_starts, counts);
    }

    // Writes all elements of tensors that are added into arrays of zeros.
    void extract_dense(const Column<int64_t>& tensors, const nb::object& arrays) {
        std::vector<Resolution::DenseExtraction> wanted;
        const auto items = items_of(arrays);
        check_length(items.size(), tensors.size());
        for (size_t i = 0; i < tensors.size(); ++i) {
            const Tensor& tensor = tensors_.at(size_t(tensors(i)));
            const View to = view_of(items[i]);
            if (to.layout || to.count != tensor.count || to.bytes != tensor.bytes) throw std::invalid_argument("an array has the wrong size");
            wanted.push_back({size_t(tensors(i)), to.data});
        }
        nb::gil_scoped_release release;
        resolution_.extract_dense(wanted);
    }

    void exchange() {
        nb::gil_scoped_release release;
        resolution_.exchange();
    }

    void compact() {
        payloads_.clear();
        resolution_.compact();
    }

    void settle() {
        nb::gil_scoped_release release;
        resolution_.settle();
    }

    void revert() {
        nb::gil_scoped_release release;
        resolution_.revert();
    }

private:
    struct Tensor {
        uint64_t changed, count;
        uint8_t bytes;
    };

    nb::list held_;  // the arrays whose memory it refers to
    std::vector<Bytes> payloads_;
    std::vector<Tensor> tensors_;
    Resolution resolution_;
};

void py_write_elements(const nb::object& array, const Column<int64_t>& indices, const Bytes& values) {
    const View view = view_of(array.ptr());
    if (values.size() != indices.size() * view.bytes) throw std::invalid_argument("an array has the wrong size");
    nb::gil_scoped_release release;
    for (size_t i = 0; i < indices.size(); ++i)
        if (uint64_t(indices(i)) >= view.count) throw std::out_of_range("an index is outside the array");
    write_elements(view, indices.data(), values.data(), indices.size());
}

// Returns four lanes for each array, one after the other.
nb::object py_digest(const nb::object& arrays, const Column<uint64_t>& seeds, unsigned threads, const std::string& isa) {
    std::vector<DigestJob> jobs;
    const Tensors tensors(arrays);
    check_length(tensors.size(), seeds.size());
    jobs.reserve(seeds.size());
    for (size_t t = 0; t < seeds.size(); ++t) jobs.push_back({tensors.at(t), seeds(t)});
    const Kernels& kernels = kernels_named(isa);
    std::vector<uint32_t> out;
    {
        nb::gil_scoped_release release;
        for (const Lanes& lanes : digest(jobs, threads, kernels)) out.insert(out.end(), lanes.begin(), lanes.end());
    }
    return own(std::move(out));
}

// Returns the address of each array, and flags: 1 if it is contiguous, 2 if it is writable.
nb::tuple py_memory_of(const nb::object& arrays) {
    const auto items = items_of(arrays);
    std::vector<uint64_t> addresses;
    std::vector<uint8_t> flags;
    addresses.reserve(items.size());
    flags.reserve(items.size());
    for (PyObject* item : items) {
        Py_buffer buffer;
        if (PyObject_GetBuffer(item, &buffer, PyBUF_STRIDED_RO)) throw nb::python_error();
        addresses.push_back(reinterpret_cast<uintptr_t>(buffer.buf));
        flags.push_back(uint8_t(PyBuffer_IsContiguous(&buffer, 'C') ? 1 : 0) | uint8_t(buffer.readonly ? 0 : 2));
        PyBuffer_Release(&buffer);
    }
    return nb::make_tuple(own(std::move(addresses)), own(std::move(flags)));
}

std::vector<View> contiguous_views(const nb::object& given) {
    const Tensors tensors(given);
    std::vector<View> views;
    views.reserve(tensors.size());
    for (size_t t = 0; t < tensors.size(); ++t) {
        views.push_back(tensors.at(t));
        if (views.back().layout) throw std::invalid_argument("an array is not contiguous");
    }
    return views;
}

// Calls `work` for each tensor, on several threads. Small tensors share a unit of work.
template <class Work>
void for_each_tensor(const std::vector<View>& views, unsigned threads, const Work& work) {
    constexpr uint64_t unit_bytes = uint64_t(1) << 22;
    std::vector<size_t> starts;
    uint64_t held = unit_bytes;
    for (size_t t = 0; t < views.size(); ++t) {
        if (held >= unit_bytes) starts.push_back(t), held = 0;
        held += views[t].count * views[t].bytes;
    }
    starts.push_back(views.size());
    struct Nothing {};
    std::vector<Nothing> workers(std::max(1u, threads));
    parallel_for(starts.size() - 1, workers, [&](Nothing&, size_t u) {
        for (size_t t = starts[u]; t < starts[u + 1]; ++t) work(t);
    });
}

// Tells for each contiguous array whether an element reaches the limit under the mask. A mask leaves out the sign, so it is not negative.
nb::object py_reaching(const nb::object& arrays, const Column<uint64_t>& masks, const Column<uint64_t>& limits, unsigned threads) {
    const std::vector<View> views = contiguous_views(arrays);
    check_length(masks.size(), views.size());
    check_length(limits.size(), views.size());
    std::vector<uint8_t> found(views.size());
    {
        nb::gil_scoped_release release;
        for_each_tensor(views, threads, [&](size_t t) { found[t] = reaches(views[t].data, views[t].count, views[t].bytes, masks(t), limits(t)); });
    }
    return own(std::move(found));
}

// Copies contiguous tensors to others of the same sizes.
void py_copy(const nb::object& from, const nb::object& to, unsigned threads) {
    const std::vector<View> sources = contiguous_views(from), targets = contiguous_views(to);
    check_length(targets.size(), sources.size());
    for (size_t t = 0; t < sources.size(); ++t)
        if (sources[t].count != targets[t].count || sources[t].bytes != targets[t].bytes) throw std::invalid_argument("tensors differ in size");
    nb::gil_scoped_release release;
    for_each_tensor(sources, threads, [&](size_t t) {
        if (sources[t].count) std::memmove(targets[t].data, sources[t].data, sources[t].count * sources[t].bytes);
    });
}

// Returns buffers one after the other as bytes. Threads copy them, because the first write to each page of new memory is slow.
nb::object py_join(const std::vector<Bytes>& pieces, unsigned threads) {
    size_t size = 0;
    for (const Bytes& piece : pieces) size += piece.size();
    nb::object joined = nb::steal(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(size)));
    if (!joined.is_valid()) throw nb::python_error();
    auto* to = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(joined.ptr()));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = uintptr_t(1) << 12;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(to) + page - 1) & ~(page - 1), last = (reinterpret_cast<uintptr_t>(to) + size) & ~(page - 1);
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // a hint: it may fail
#endif
    constexpr size_t unit = size_t(2) << 20;
    struct Copy {
        uint8_t* to;
        const uint8_t* from;
        size_t bytes;
    };
    std::vector<Copy> copies;
    for (const Bytes& piece : pieces)
        for (size_t at = 0; at < piece.size(); at += unit) {
            copies.push_back({to, piece.data() + at, std::min(unit, piece.size() - at)});
            to += copies.back().bytes;
        }
    nb::gil_scoped_release release;
    struct Nothing {};
    std::vector<Nothing> workers(std::max(1u, threads));
    parallel_for(copies.size(), workers, [&](Nothing&, size_t c) { std::memcpy(copies[c].to, copies[c].from, copies[c].bytes); });
    return joined;
}

// Returns four numbers for each chunk (mode, size, changed elements, bytes), and how the values of the payload are coded.
nb::tuple py_inspect(const Bytes& payload, const Type& type, bool old) {
    const PayloadFacts facts = inspect({payload.data(), payload.size()}, element_type(type), old);
    std::vector<int64_t> chunks;
    chunks.reserve(4 * facts.chunks.size());
    for (const auto& c : facts.chunks) chunks.insert(chunks.end(), {int64_t(c.mode), int64_t(c.elements), int64_t(c.changed), int64_t(c.bytes)});
    return nb::make_tuple(own(std::move(chunks)), facts.bodies.changes_by_mode, facts.bodies.steps_by_length);
}

// Returns three numbers for each chunk of a group's payload: where its body begins, the first number of its header, and the bytes of its body.
nb::object py_find_chunks(const Bytes& payload) {
    const std::span<const uint8_t> bytes{payload.data(), payload.size()};
    std::vector<int64_t> out;
    {
        nb::gil_scoped_release release;
        for (size_t at = 0; at < bytes.size();) {
            const uint32_t header = get_varint(bytes, at), body = get_varint(bytes, at);
            if (body > bytes.size() - at) throw Corrupt("a chunk's body is cut short.");
            out.insert(out.end(), {int64_t(at), int64_t(header), int64_t(body)});
            at += body;
        }
    }
    return own(std::move(out));
}

}  // namespace
}  // namespace deltawire

NB_MODULE(_native, m) {
    using namespace deltawire;
    nb::exception<Corrupt>(m, "Corrupt");
    nb::exception<WrongType>(m, "WrongType");
    nb::exception<WrongCount>(m, "WrongCount");
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Kernels* k : available_kernels()) names.emplace_back(k->name);
        return names;
    });
    nb::class_<Addresses>(m, "Addresses")
        .def(nb::init<const Column<uint64_t>&, const Column<int64_t>&, const Column<uint8_t>&, nb::object>(), "addresses"_a, "counts"_a, "itemsizes"_a,
             "owner"_a);
    nb::class_<Preparation>(m, "Preparation");
    m.def("encode_groups", &py_encode_groups, "groups"_a, "threads"_a, "isa"_a, "preparation"_a = nb::none());
    m.def("digest", &py_digest, "arrays"_a, "seeds"_a, "threads"_a, "isa"_a);
    m.def("memory_of", &py_memory_of, "arrays"_a);
    m.def("reaching", &py_reaching, "arrays"_a, "masks"_a, "limits"_a, "threads"_a);
    m.def("copy", &py_copy, "source"_a, "target"_a, "threads"_a);
    m.def("join", &py_join, "pieces"_a, "threads"_a);
    m.def("write_elements", &py_write_elements, "array"_a, "indices"_a, "values"_a);
    m.def("inspect", &py_inspect, "payload"_a, "type"_a, "old"_a);
    m.def("bytes_done", [] { return bytes_done.load(std::memory_order_relaxed); });
    m.def("find_chunks", &py_find_chunks, "payload"_a);
    nb::class_<PyResolution>(m, "Resolution")
        .def(nb::init<unsigned, size_t, bool, const std::string&>(), "threads"_a, "budget"_a, "defer"_a, "isa"_a)
        .def("add", &PyResolution::add, "groups"_a, "old"_a)
        .def("extract", &PyResolution::extract, "tensors"_a)
        .def("extract_dense", &PyResolution::extract_dense, "tensors"_a, "arrays"_a)
        .def("exchange", &PyResolution::exchange)
        .def("compact", &PyResolution::compact)
        .def("settle", &PyResolution::settle)
        .def("revert", &PyResolution::revert);
    bind_quantise(m);
    bind_routing(m);
}
